"""Checkpointer on one process: what is saved is what was there when `save` was called."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import NAMES, random_tensor, run_script, same
from torch import nn

import forebay
from forebay import Checkpointer


def stock(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """What torch's own reader makes of a checkpoint; `like` is built as it was saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(like, checkpoint_id=str(folder))
    return like


def committed(checkpoints: Checkpointer) -> list[int]:
    return [one["step"] for one in checkpoints.steps() if one["state"] == "committed"]


def test_torch_reads_every_dtype_and_shape_back(tmp_path: Path) -> None:
    shapes = [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4, 5)]
    dtypes = [dtype for dtype in NAMES if "float4" not in str(dtype)]
    state: dict[str, Any] = {
        f"{dtype}{list(shape)}": random_tensor(dtype, shape) for dtype in dtypes for shape in shapes
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"t": state}, blocking=True)
        blank = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        report = checkpoints.restore({"t": blank})
    assert report.bytes == sum(tensor.nbytes for tensor in state.values())
    theirs = {"t": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
    stock(tmp_path / "step-1", theirs)
    for name, tensor in state.items():
        assert same(blank[name], tensor), name
        assert same(theirs["t"][name], tensor), name


def test_views_are_saved_as_they_look(tmp_path: Path) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    images = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    numbers = torch.view_as_complex(torch.arange(12.0).reshape(6, 2))
    state = {
        "transposed": whole.clone().t(),
        "channels_last": images.contiguous(memory_format=torch.channels_last),
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
        "columns": whole.clone()[:, 2:5],
        "every other": torch.arange(10)[::2],
        "conjugate": numbers.conj(),
        "negated": numbers.clone().conj().imag,
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state).wait()
        blank = {name: torch.full_like(one.contiguous(), 0) for name, one in state.items()}
        checkpoints.restore(blank)
        backwards = {
            name: torch.zeros(one.shape[::-1], dtype=one.dtype).permute(*range(one.dim())[::-1])
            for name, one in state.items()
        }
        checkpoints.restore(backwards)
    theirs = stock(tmp_path / "step-1", {n: torch.zeros_like(v) for n, v in blank.items()})
    for name, tensor in state.items():
        for found in (blank[name], backwards[name], theirs[name]):
            assert torch.equal(found, tensor.resolve_conj().resolve_neg()), name


def test_values_changed_after_the_call_are_not_saved(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1 << 20), "small": [torch.zeros(3)], "step": 7, "list": [1, 2]}
    with Checkpointer(tmp_path, staging_bytes="8MiB") as checkpoints:
        for round_ in range(5):
            state["w"].fill_(round_)
            state["small"][0].fill_(round_)
            state["step"], state["list"] = round_, [round_]
            handle = checkpoints.save(round_, state)
            # As an optimizer on the CPU does, at once.
            state["w"].fill_(-1)
            state["small"][0].fill_(-1)
            state["step"] = -1
            state["list"].append(-1)
            assert handle.step == round_
        checkpoints.wait()
        for round_ in range(5):
            blank = {"w": torch.ones(1 << 20), "small": [torch.ones(3)], "step": 0, "list": []}
            checkpoints.restore(blank, round_)
            assert bool((blank["w"] == round_).all()) and blank["small"][0].tolist() == [round_] * 3
            assert blank["step"] == round_ and blank["list"] == [round_]


def test_a_tensor_that_moved_is_read_where_it_is_now(tmp_path: Path) -> None:
    module = nn.Linear(64, 64)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": module}).wait()
        for step in (2, 3):
            old = module.weight.data
            # Same object, same shape, other memory; the old memory lives on with old values.
            module.weight.data = torch.full((64, 64), float(step))
            checkpoints.save(step, {"model": module}).wait()
            assert not torch.equal(old, module.weight.data)
        for step in (2, 3):
            blank = nn.Linear(64, 64)
            checkpoints.restore({"model": blank}, step)
            assert bool((blank.weight == step).all())


def test_a_structure_that_changes_is_saved_as_it_is(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": torch.zeros(4), "n": None}
    steps: list[dict[str, Any]] = [
        {"a": torch.ones(4), "n": 5},
        {"a": torch.ones(4), "n": torch.ones(2)},
        {"a": torch.ones(5), "n": torch.ones(2)},
        {"a": torch.ones(5, dtype=torch.float64), "n": torch.ones(2)},
        {"a": torch.ones(5, dtype=torch.float64), "n": {"m": torch.ones(2)}},
        {"a": [1, 2], "n": {"m": torch.ones(2)}},
        {"a": [1, torch.ones(2)], "n": {"m": torch.ones(2)}},
    ]
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state).wait()
        for step, now in enumerate(steps, 1):
            checkpoints.save(step, now).wait()
        for step, now in enumerate(steps, 1):
            blank = _blank(now)
            checkpoints.restore(blank, step)
            assert _equal(blank, now), step


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _blank(one) for key, one in value.items()}
    if isinstance(value, list) and any(isinstance(one, torch.Tensor) for one in value):
        return [_blank(one) for one in value]
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def test_tied_weights_are_stored_once_and_restored_under_both_names(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 32)
            self.head = nn.Linear(32, 100, bias=False)
            self.head.weight = self.embed.weight

    net, other = Net(), Net()
    with Checkpointer(tmp_path) as checkpoints:
        report = checkpoints.save(1, {"net": net}).result()
        assert report["tensor_bytes"] == 100 * 32 * 4
        checkpoints.restore({"net": other})
        assert torch.equal(other.head.weight, net.head.weight)
        assert other.head.weight is other.embed.weight
        apart = {"net": {"embed.weight": torch.zeros(100, 32), "head.weight": torch.zeros(100, 32)}}
        checkpoints.restore(apart)
        # One of the names is enough for a tied pair.
        checkpoints.save(2, {"net": {"embed.weight": net.embed.weight}}).wait()
        third = Net()
        assert checkpoints.restore({"net": third}, 2).missing == []
        assert torch.equal(third.head.weight, net.head.weight)
        # Untied later, they are two tensors again.
        net.head.weight = nn.Parameter(torch.ones(100, 32))
        report = checkpoints.save(3, {"net": net}).result()
        assert report["tensor_bytes"] == 2 * 100 * 32 * 4
    for weight in apart["net"].values():
        assert torch.equal(weight, other.embed.weight)
    theirs = {"net": {"embed.weight": torch.zeros(100, 32), "head.weight": torch.zeros(100, 32)}}
    stock(tmp_path / "step-1", theirs)
    assert torch.equal(theirs["net"]["head.weight"], other.embed.weight)


def test_tensors_that_share_part_of_their_memory_are_refused(tmp_path: Path) -> None:
    buffer = torch.zeros(10)
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(forebay.SharedTensorsError, match="`a` and `b`"):
            checkpoints.save(1, {"a": buffer[:6], "b": buffer[4:]})
        # Sound before, overlapping now.
        checkpoints.save(1, {"a": buffer[:6], "b": torch.zeros(6)}).wait()
        with pytest.raises(forebay.SharedTensorsError):
            checkpoints.save(2, {"a": buffer[:6], "b": buffer[4:]})
        assert committed(checkpoints) == [1]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (torch.zeros(3).to_sparse(), forebay.UnsupportedError, "sparse"),
        (torch.empty(3, device="meta"), forebay.UsageError, "meta device"),
        (lambda: None, forebay.UnsupportedError, "cannot be pickled"),
        (torch.zeros(2, dtype=torch.complex128), None, ""),
    ],
    ids=["sparse", "meta", "lambda", "complex128"],
)
def test_what_cannot_be_stored_is_named(
    tmp_path: Path, value: object, error: type[Exception] | None, text: str
) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        state = {"good": torch.zeros(2), "model": {"odd one": value}}
        if error is None:
            with pytest.raises(forebay.UnsupportedError, match="odd one"):
                checkpoints.save(1, state)
        else:
            with pytest.raises(error, match=text) as caught:
                checkpoints.save(1, state)
            assert "model.odd one" in str(caught.value)
        # Nothing is broken by it.
        checkpoints.save(2, {"good": torch.zeros(2)}).wait()
        assert committed(checkpoints) == [2]


def test_objects_of_all_kinds_come_back(tmp_path: Path) -> None:
    import random

    import numpy as np

    state = {
        "plain": {"i": 1 << 70, "f": 0.1, "s": "ü", "b": b"\0\xff", "t": (1, (2, "x")), "n": None},
        "lists": [[1, 2], ["a", [None]]],
        "set": {1, 2},
        "python rng": random.getstate(),
        "numpy rng": np.random.get_state(),
        "array": np.arange(5, dtype=np.int16),
        "tuple of tensors": (torch.arange(3), "x"),
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state).wait()
        blank: dict[str, Any] = {
            "plain": dict.fromkeys(state["plain"]),  # type: ignore[call-overload]
            **{name: None for name in state if name != "plain"},
        }
        checkpoints.restore(blank)
    theirs = {"plain": dict.fromkeys(state["plain"]), "python rng": None, "array": None}  # type: ignore[call-overload]
    stock(tmp_path / "step-1", theirs)
    assert blank["plain"] == state["plain"] == theirs["plain"]
    assert type(blank["plain"]["t"]) is tuple and blank["lists"] == state["lists"]
    assert blank["set"] == {1, 2} and blank["python rng"] == state["python rng"]
    random.setstate(blank["python rng"])
    np.random.set_state(blank["numpy rng"])
    assert blank["array"].tolist() == theirs["array"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(blank["tuple of tensors"][0], torch.arange(3))


def test_side_files_are_part_of_the_commit(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        files = {"scheduler.json": b'{"lr": 0.1}', "empty": b""}
        checkpoints.save(1, {"a": torch.zeros(1)}, side_files=files).wait()
        assert checkpoints.side_files(1) == files
        checkpoints.save(2, {"a": torch.zeros(1)}).wait()
        assert checkpoints.side_files() == {}
        for name in ("../up", "a/b", ".metadata", "", "n" * 201):
            with pytest.raises(forebay.UsageError, match="cannot be called"):
                checkpoints.save(3, {"a": torch.zeros(1)}, side_files={name: b""})
        assert committed(checkpoints) == [1, 2]


def test_a_state_of_nothing_is_told_and_attach_takes_optimizers(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match="the step holds nothing") as warned:
            checkpoints.save(1, {}, blocking=True)
        assert warned[0].filename == __file__
        with pytest.raises(forebay.UsageError, match="takes an optimizer, not Linear"):
            checkpoints.attach(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_parts_of_the_state_that_hold_nothing_are_told(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match=r"hold nothing.*optim\.state"):
            handle = checkpoints.save(1, {"optim": optimizer, "w": torch.zeros(1)})
        assert handle.result()["empty"] == ["optim.state"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoints.save(2, {"optim": optimizer, "w": torch.zeros(1)}).wait()


def test_saves_after_close_start_anew(tmp_path: Path) -> None:
    checkpoints = Checkpointer(tmp_path)
    state = {"w": torch.zeros(8)}
    for step in range(4):
        state["w"].fill_(step)
        checkpoints.save(step, state)
        if step % 2:
            assert checkpoints.close()
    assert committed(checkpoints) == [0, 1, 2, 3] and checkpoints.latest() == 3
    for step in range(4):
        checkpoints.restore(state, step)
        assert state["w"].tolist() == [step] * 8


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for value in (1.0, 2.0):
            checkpoints.save(5, {"w": torch.full((4,), value)}).wait()
            blank = {"w": torch.zeros(4)}
            checkpoints.restore(blank, 5)
            assert blank["w"].tolist() == [value] * 4
    with Checkpointer(tmp_path, overwrite=False) as checkpoints:
        with pytest.raises(forebay.Error) as caught:
            checkpoints.save(5, {"w": torch.zeros(4)}).wait()
        assert caught.value.code == "already_exists"
        checkpoints.restore(blank, 5)
        assert blank["w"].tolist() == [2.0] * 4


def test_memory_is_given_back_on_demand(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, staging_bytes="64MiB") as checkpoints:
        state = {"w": torch.zeros(4 << 20)}
        checkpoints.save(1, state).wait()
        run = checkpoints._run
        assert run is not None
        (pool,) = run.natives._pools.values()
        assert pool.touched_bytes >= 16 << 20
        del pool
        before = _resident()
        checkpoints.release()
        assert run.natives._pools == {}
        until = time.monotonic() + 10
        while before - _resident() < 32 << 20:
            assert time.monotonic() < until, "the pool is still there"
            time.sleep(0.01)
        checkpoints.save(2, state).wait()
        assert committed(checkpoints) == [1, 2]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_many_tensors_need_no_more_files_than_few(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, threads=2) as checkpoints:
        state = {f"t{number}": torch.full((4,), float(number)) for number in range(3000)}
        checkpoints.save(0, state).wait()
        before = len(os.listdir("/proc/self/fd"))
        handle = checkpoints.save(1, state)
        peak = 0
        while not handle.done():
            peak = max(peak, len(os.listdir("/proc/self/fd")))
        handle.wait()
        assert peak - before < 40
        files = [name for name in os.listdir(tmp_path / "step-1") if name.endswith(".distcp")]
        assert 1 <= len(files) <= 2


@pytest.mark.parametrize("staging", ["1MiB", "64MiB"])
def test_training_goes_on_once_everything_is_staged(tmp_path: Path, staging: str) -> None:
    with Checkpointer(tmp_path, staging_bytes=staging) as checkpoints:
        state = {"w": torch.ones(6 << 20)}
        handle = checkpoints.save(1, state, overlap=True)
        assert handle.staged(30)
        state["w"].zero_()
        report = handle.result(60)
        assert report["snapshot"] == ("stream" if staging == "1MiB" else "pool")
        blank = {"w": torch.zeros(6 << 20)}
        checkpoints.restore(blank)
        assert bool((blank["w"] == 1).all())


def test_a_hook_waits_just_before_the_optimizer_steps(tmp_path: Path) -> None:
    module = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with Checkpointer(tmp_path, staging_bytes="2MiB") as checkpoints:
        hook = checkpoints.attach(optimizer)
        saved = []
        for step in range(4):
            saved.append(module.weight.detach().clone())
            handle = checkpoints.save(step, {"model": module, "optim": optimizer})
            module(torch.randn(4, 512)).sum().backward()
            optimizer.step()
            assert handle.staged(0)
        checkpoints.wait()
        for step, weight in enumerate(saved):
            blank = {"model": {"weight": torch.zeros(512, 512), "bias": torch.zeros(512)}}
            checkpoints.restore(blank, step)
            assert torch.equal(blank["model"]["weight"], weight)
        hook.remove()
        assert not checkpoints._hooks


def test_a_save_that_meets_the_last_one_does_as_told(tmp_path: Path) -> None:
    state = {"w": torch.zeros(1 << 20)}
    with Checkpointer(tmp_path / "wait") as checkpoints:
        handles = [checkpoints.save(step, state) for step in range(4)]
        checkpoints.wait()
        assert all(handle.done() for handle in handles)
        assert committed(checkpoints) == [0, 1, 2, 3]
    with Checkpointer(tmp_path / "skip", on_busy="skip") as checkpoints:
        handles = [checkpoints.save(step, state) for step in range(20)]
        checkpoints.wait()
        ran = [handle.step for handle in handles if not handle.skipped]
        assert ran[0] == 0 and committed(checkpoints) == ran
        for handle in handles:
            assert handle.wait() is not handle.skipped
            assert handle.done() and handle.result()["step"] == handle.step
    with Checkpointer(tmp_path / "supersede", on_busy="supersede") as checkpoints:
        handles = [checkpoints.save(step, state) for step in range(6)]
        checkpoints.wait()
        ended = [handle.exception() for handle in handles]
        assert ended[-1] is None
        for handle, error in zip(handles, ended, strict=True):
            assert error is None or error.code == "cancelled", handle
        kept = [handle.step for handle, error in zip(handles, ended, strict=True) if error is None]
        assert committed(checkpoints) == kept


def test_old_steps_go_after_a_commit(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (5, 10, 15, 20, 25):
            checkpoints.save(step, {"w": torch.zeros(4)}).wait()
    with Checkpointer(tmp_path, keep_last=2, keep_every=10) as checkpoints:
        checkpoints.restore({"w": torch.zeros(4)})
        checkpoints.save(30, {"w": torch.zeros(4)})
    assert committed(checkpoints) == [10, 20, 25, 30]
    told = checkpoints.prune(keep_last=1, grace_s=0, dry_run=True)
    assert told["unpublished"] == [25] and committed(checkpoints) == [10, 20, 25, 30]
    checkpoints.prune(keep_last=1, pins=(25,), grace_s=0)
    assert committed(checkpoints) == [10, 20, 25, 30]
    checkpoints.prune(keep_last=1, grace_s=0)
    assert committed(checkpoints) == [10, 20, 30]


def test_steps_of_another_run_are_not_pruned(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as before:
        for step in (5, 10):
            before.save(step, {"w": torch.zeros(4)}).wait()
    # A start from nothing, not from what is there.
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.zeros(4)}).wait()
    assert committed(checkpoints) == [2, 5, 10] and checkpoints.latest() == 2


def test_a_failed_save_is_told_and_the_next_one_works(tmp_path: Path) -> None:
    code = """
import resource, signal, sys, time, warnings, torch, forebay
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = forebay.Checkpointer(sys.argv[1])
state = {"w": torch.zeros(1 << 20)}
checkpoints.save(1, state).wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
handle = checkpoints.save(2, state)
error = handle.exception(30)
assert error is not None and error.code in ("io", "no_space"), error
assert isinstance(error, forebay.IoError)
try:
    handle.wait()
except forebay.IoError as raised:
    assert raised is error
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
checkpoints.save(3, state).wait()
print([one["step"] for one in checkpoints.steps() if one["state"] == "committed"])
# An error that nobody asked for is a warning of the next save.
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
handle = checkpoints.save(4, state)
while not handle.done():
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    checkpoints.save(5, state).wait()
assert "step 4 failed" in str(caught[0].message), caught
"""
    assert "[1, 3]" in run_script(code, tmp_path)


def test_an_exit_waits_for_the_save_under_way(tmp_path: Path) -> None:
    code = """
import sys, torch, forebay
checkpoints = forebay.Checkpointer(sys.argv[1])
checkpoints.save(9, {"w": torch.ones(4 << 20)})
"""
    run_script(code, tmp_path)
    checkpoints = Checkpointer(tmp_path)
    blank = {"w": torch.zeros(4 << 20)}
    assert checkpoints.restore(blank).step == 9
    assert bool((blank["w"] == 1).all())


def test_a_checkpointer_stays_in_its_process(tmp_path: Path) -> None:
    code = """
import os, pickle, sys, torch, forebay
checkpoints = forebay.Checkpointer(sys.argv[1])
state = {"w": torch.ones(1 << 20)}
handle = checkpoints.save(1, state)
child = os.fork()
if not child:
    try:
        checkpoints.save(2, state)
    except forebay.ForkedError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
handle.wait()
try:
    pickle.dumps(checkpoints)
except forebay.UsageError:
    print("refused")
# A worker of a data loader, say, that ends by itself: it must not wait for saves of its parent.
handle = checkpoints.save(3, state)
child = os.fork()
if not child:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
handle.wait()
"""
    assert "refused" in run_script(code, tmp_path)


def test_calls_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(forebay.UsageError, match="on_busy"):
        Checkpointer(tmp_path, on_busy="never")  # type: ignore[arg-type]
    with pytest.raises(forebay.UsageError, match="keep_last"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(forebay.UsageError, match="no store"):
        Checkpointer("ftp://host/path")
    with Checkpointer(tmp_path) as checkpoints:
        for step in (-1, 1.5, "7", True, None):
            with pytest.raises(forebay.UsageError, match="step"):
                checkpoints.save(step, {})  # type: ignore[arg-type]
        with pytest.raises(forebay.UsageError, match="per_rank"):
            checkpoints.save(1, {"per_rank/0/x": 1})
        import numpy as np

        checkpoints.save(np.int64(3), {"w": torch.zeros(1)}).wait()  # type: ignore[arg-type]
        assert committed(checkpoints) == [3]


def test_torch_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, forebay; print('torch' in sys.modules, 'Checkpointer' in dir(forebay))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split()[0] == "False"


def test_the_stall_is_predicted_from_what_the_machine_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(24 << 20), "n": 1}
    with Checkpointer(tmp_path / "pool", staging_bytes="128MiB", state=state) as checkpoints:
        predicted = checkpoints.predicted_stall_s
        assert predicted is not None and 0 < predicted < 10
        report = checkpoints.save(1, state).result()
        assert (
            report["predicted_stall_s"] == pytest.approx(predicted) and report["snapshot"] == "pool"
        )
    assert not caplog.records
    with Checkpointer(tmp_path / "stream", staging_bytes="8MiB", state=state) as checkpoints:
        predicted = checkpoints.predicted_stall_s
        assert predicted is not None and 0 < predicted < 60
        assert "hold up training" in caplog.text and "stream" in caplog.text
        report = checkpoints.save(1, state).result()
        assert report["snapshot"] == "stream" and report["stall_seconds"] > 0
        # From then on the saves themselves tell the rate.
        again = checkpoints.save(2, state).result()["predicted_stall_s"]
        assert again == pytest.approx((96 - 8) / 96 * report["write_seconds"], rel=0.01)
    assert sorted(os.listdir(tmp_path / "stream")) == [".forebay", "step-1", "step-2"]
    with Checkpointer(tmp_path / "none") as checkpoints:
        assert checkpoints.predicted_stall_s is None
        assert checkpoints.save(1, {"w": torch.ones(3)}).result()["predicted_stall_s"] is None
