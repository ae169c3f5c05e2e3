"""Checkpointer where things go wrong, or change, at the wrong moment: interrupts, threads that fail, values that become
something else, objects that nobody closes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_script
from test_ckpt_handle import Running
from torch import nn

import forebay
from forebay import Checkpointer
from forebay._ckpt import life, restoring, retention, stall
from forebay._ckpt.background import Background
from forebay._ckpt.handle import SaveHandle
from forebay._ckpt.retention import Retention
from forebay._ckpt.saving import Run
from forebay._ckpt.snapshot import Snapshots
from forebay._ckpt.training import Owned


def committed(checkpoints: Checkpointer) -> list[int]:
    return [one["step"] for one in checkpoints.steps() if one["state"] == "committed"]


# Tensors that become something else


def test_a_tensor_that_becomes_another_class_is_described_again(tmp_path: Path) -> None:
    code = """
import sys, torch, forebay
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)

class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
    def __init__(self, inner):
        self.inner = inner
    def __tensor_flatten__(self):
        return ["inner"], None
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda one: one.inner if isinstance(one, cls) else one
        return cls(func(*map(unwrap, args), **(kwargs or {})))

mesh = init_device_mesh("cpu", (1,))
with forebay.Checkpointer(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {"w": torch.ones(64)}).wait()
    checkpoints.save(2, {"w": distribute_tensor(torch.full((64,), 2.0), mesh, [Shard(0)])}).wait()
    checkpoints.save(3, {"w": torch.nn.Parameter(torch.full((64,), 3.0))}).wait()
    try:
        checkpoints.save(4, {"w": Wrapper(torch.ones(64))})
    except forebay.UnsupportedError as error:
        assert "Wrapper" in str(error)
    for step in (1, 2, 3):
        blank = {"w": torch.zeros(64)}
        checkpoints.restore(blank, step)
        assert blank["w"].tolist() == [step] * 64
print([one["step"] for one in checkpoints.steps() if one["state"] == "committed"])
"""
    assert "[1, 2, 3]" in run_script(code, tmp_path)


def test_a_tensor_without_memory_is_an_error_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Snapshots.take

    def at_zero(*arguments: Any) -> Any:
        taken = original(*arguments)
        taken.addresses = [0] * len(taken.addresses)
        return taken

    state = {"w": torch.ones(4), "none": torch.zeros(0)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state).wait()
        monkeypatch.setattr(Snapshots, "take", at_zero)
        with pytest.raises(forebay.UsageError, match="address 0, w"):
            checkpoints.save(2, state)
        checkpoints.save(3, {"none": torch.zeros(0)}).wait()
        monkeypatch.undo()
        checkpoints.save(4, state).wait()
        assert committed(checkpoints) == [1, 3, 4]


# Memory that changes too early


def test_a_restore_waits_for_the_save_that_reads_what_it_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(4)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state).wait()
        running, read_when_over = Running(), []
        monkeypatch.setattr(Run, "_start", lambda *_: running)
        state["w"].fill_(2)
        checkpoints.save(2, state, overlap=True)
        original = restoring.restore

        def restore(*arguments: Any) -> Any:
            read_when_over.append(running.ended.is_set())
            return original(*arguments)

        monkeypatch.setattr(restoring, "restore", restore)
        threading.Timer(0.3, running.succeed).start()
        checkpoints.restore(state, 1)
        assert read_when_over == [True] and state["w"].tolist() == [0] * 4


def test_what_no_hook_answers_for_is_copied_before_the_save_returns(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(1024, 4096), nn.BatchNorm1d(4096))
    other = nn.Linear(1024, 1024)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(4, 1024)).sum().backward()
    optimizer.step()
    state = {
        "average": torch.zeros(4 << 20),
        "model": module,
        "other": other,
        "optim": optimizer,
        "view": torch.arange(6.0).reshape(2, 3).t(),
    }
    with Checkpointer(tmp_path, staging_bytes="8MiB") as checkpoints:
        checkpoints.attach(optimizer)
        for step in (1, 2):
            assert isinstance(state["average"], torch.Tensor)
            state["average"].fill_(step)
            mean = module[1].running_mean.clone()  # type: ignore[union-attr]
            weight, owned = other.weight.detach().clone(), module[0].weight.detach().clone()
            handle = checkpoints.save(step, state)
            assert not handle._settled
            # What a forward pass, and an optimizer without a hook, do.
            module[1].running_mean.fill_(-1)  # type: ignore[operator,union-attr]
            state["average"].fill_(-1)
            with torch.no_grad():
                other.weight.fill_(-1)
            module(torch.randn(4, 1024)).sum().backward()
            optimizer.step()
            assert handle.result(60)["snapshot"] == "stream"
            blank = {
                "average": torch.zeros(4 << 20),
                "model": {"1.running_mean": torch.zeros(4096), "0.weight": torch.zeros(4096, 1024)},
                "other": {"weight": torch.zeros(1024, 1024)},
            }
            checkpoints.restore(blank, step, strict=False)
            assert bool((blank["average"] == step).all())  # type: ignore[union-attr]
            assert torch.equal(blank["model"]["1.running_mean"], mean)
            assert torch.equal(blank["model"]["0.weight"], owned)
            assert torch.equal(blank["other"]["weight"], weight)


def test_a_save_of_more_than_can_be_set_aside_does_not_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay._ckpt import snapshot

    monkeypatch.setattr(snapshot, "HOST_SHADOW_BYTES", 1 << 20)
    module = nn.Linear(8, 8)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.attach(torch.optim.SGD(module.parameters()))
        handle = checkpoints.save(1, {"model": module, "average": torch.ones(1 << 20)})
        assert handle._settled


def test_a_hook_answers_for_parameters_and_their_state_alone() -> None:
    module = nn.Linear(16, 16)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    owned = Owned([optimizer])
    state = optimizer.state[module.weight]
    whole = module.weight.detach()
    assert all(one in owned for one in (whole, module.bias, state["exp_avg"], state["step"]))
    assert whole[4:6] in owned and whole[15:] in owned
    assert whole[:, 2:4] not in owned
    assert torch.ones(16, 16) not in owned and module.weight.grad not in owned
    # What only begins there.
    flat = torch.zeros(64)
    small = torch.optim.SGD([nn.Parameter(flat[:32])])
    assert flat[:32] in Owned([small]) and flat not in Owned([small])
    assert flat[16:40] not in Owned([small])


# Interrupts


def _interrupt_after(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_save_that_is_interrupted_while_it_reads_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    class Slow(Running):
        """It goes on reading a while after it is told to end."""

        def cancel(self) -> None:
            threading.Timer(0.3, super().cancel).start()

    running = Slow()
    state = {"w": torch.ones(4)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state).wait()
        monkeypatch.setattr(Run, "_start", lambda *_: running)
        _interrupt_after(0.2)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, state, blocking=blocking)
        assert running.error is not None and running.error.code == "cancelled"
        monkeypatch.undo()
        checkpoints.save(3, state).wait()
        assert committed(checkpoints) == [1, 3]


def test_a_hook_that_is_interrupted_gives_the_save_up() -> None:
    running = Running()
    handle = SaveHandle(5, running, {})
    line = Background("test")
    line.put(lambda: settle(handle))
    _interrupt_after(0.2)
    with pytest.raises(KeyboardInterrupt):
        handle.settle()
    error = handle.exception(10)
    assert error is not None and error.code == "cancelled" and handle.cancelled
    line.close(10)


def settle(handle: SaveHandle) -> None:
    from forebay._ckpt import handle as module

    module.settle(handle)


def test_a_time_below_zero_is_no_time(tmp_path: Path) -> None:
    state = {"w": torch.ones(32 << 20)}
    with Checkpointer(tmp_path, staging_bytes="8MiB") as checkpoints:
        handle = checkpoints.save(1, state, overlap=True)
        assert handle.staged(-1) is False and handle.wait(-1) is False
        assert handle.staged(1e30) and handle.wait(60)


class Vanishing(SaveHandle):
    """Its save ends between two looks at it."""

    @property
    def _running(self) -> Any:
        found, self._left = self._left, None
        return found

    @_running.setter
    def _running(self, value: Any) -> None:
        self._left = value


@pytest.mark.parametrize("ask", ["staged", "cancel"])
def test_asking_a_save_that_ends_meanwhile(ask: str) -> None:
    running = Running()
    running.succeed()
    getattr(Vanishing(1, running, {}), ask)()


# Threads


def test_a_thread_goes_on_after_a_job_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    line, done = Background("test"), []

    def bad() -> None:
        raise ValueError("of a test")

    for job in (bad, lambda: done.append(1), bad, lambda: done.append(2)):
        line.put(job)
    assert line.close(10) and done == [1, 2]
    assert caplog.text.count("ValueError: of a test") == 2
    assert not [one for one in threading.enumerate() if one.name == "test"]
    line.put(lambda: done.append(3))
    assert line.close(10) and done == [1, 2, 3]


def test_saves_go_on_where_what_follows_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.ones(4)}
    with Checkpointer(tmp_path) as checkpoints:

        def bad(_: Any) -> None:
            raise ValueError("of a test")

        monkeypatch.setattr(Retention, "ask", bad)
        for step in (1, 2, 3):
            assert checkpoints.save(step, state).wait(30)
        assert committed(checkpoints) == [1, 2, 3]


def test_pruning_goes_on_after_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def prune(*_: Any) -> None:
        calls.append(1)
        raise ValueError("of a test")

    monkeypatch.setattr(retention, "prune", prune)
    state = {"w": torch.ones(4)}
    with Checkpointer(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state).wait()
            until = time.monotonic() + 10
            while len(calls) < step:
                assert time.monotonic() < until
                time.sleep(0.01)


def test_without_a_thread_there_is_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(4)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state).wait()
        checkpoints._run.watcher.close(10)  # type: ignore[union-attr]

        def none(_: Any) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", none)
        with pytest.raises(forebay.IoError, match="no thread"):
            checkpoints.save(2, state)
        monkeypatch.undo()
        checkpoints.save(3, state).wait()


@pytest.mark.parametrize("attached", [False, True])
def test_a_checkpointer_that_nobody_holds_is_freed_with_its_threads(
    tmp_path: Path, attached: bool
) -> None:
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters())
    checkpoints = Checkpointer(tmp_path, keep_last=1)
    if attached:
        checkpoints.attach(optimizer)
    for step in (1, 2):
        checkpoints.save(step, {"model": module}).wait()
    run = checkpoints._run
    assert run is not None
    (pool,) = run.natives._pools.values()
    gone = [weakref.ref(one) for one in (checkpoints, run, run.natives)]
    gc.disable()
    try:
        del checkpoints, run, pool
        until = time.monotonic() + 10
        while any(one() is not None for one in gone) or _own_threads():
            assert time.monotonic() < until, (gone, threading.enumerate())
            time.sleep(0.01)
    finally:
        gc.enable()
    optimizer.step()


def _own_threads() -> list[threading.Thread]:
    names = ("forebay-saves", "forebay-prune")
    return [one for one in threading.enumerate() if one.name in names]


def test_an_exit_waits_for_a_save_whose_checkpointer_nobody_holds(tmp_path: Path) -> None:
    code = """
import sys, torch, forebay
forebay.Checkpointer(sys.argv[1]).save(9, {"w": torch.ones(16 << 20)})
"""
    run_script(code, tmp_path)
    assert committed(Checkpointer(tmp_path)) == [9]


# The end


def test_the_exit_closes_all_even_if_one_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class One:
        closed = 0

        def _exit(self, timeout: float) -> None:
            One.closed += 1
            raise ValueError("of a test")

    ones = [One(), One(), One()]
    monkeypatch.setattr(life, "_open", weakref.WeakSet(ones))
    life._at_exit()
    assert One.closed == 3 and caplog.text.count("ValueError: of a test") == 3


def failing(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    running.fail("no_space")
    monkeypatch.setattr(Run, "_start", lambda *_: running)


def test_a_close_raises_what_the_last_save_failed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(Running(), monkeypatch)
    state = {"w": torch.ones(4)}
    with pytest.raises(forebay.NoSpaceError, match="rank 3"), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    # Once, and everything was given back.
    assert checkpoints._run is None and checkpoints.close()
    # Who has seen it is not told again.
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.save(1, state).exception(10) is not None
    running = Running()
    monkeypatch.setattr(Run, "_start", lambda *_: running)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, overlap=True).cancel()
    failing(Running(), monkeypatch)
    # Another exception is not replaced.
    with (
        warnings.catch_warnings(record=True) as caught,
        pytest.raises(ZeroDivisionError),
        Checkpointer(tmp_path) as checkpoints,
    ):
        warnings.simplefilter("always")
        checkpoints.save(1, state)
        raise ZeroDivisionError
    assert "no_space" in str(caught[-1].message)


def test_an_exit_says_that_the_last_save_failed_and_closes_the_rest(tmp_path: Path) -> None:
    code = """
import resource, signal, sys, torch, forebay
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
other = forebay.Checkpointer(sys.argv[1] + "/other")
bad = forebay.Checkpointer(sys.argv[1] + "/bad")
handle = bad.save(1, {"w": torch.zeros(1 << 20)})
while not handle.done():
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
bad.save(2, {"w": torch.zeros(1 << 20)})
bad.wait  # not called
other.save(1, {"w": torch.zeros(4)})
"""
    run_script(code, tmp_path)
    assert committed(Checkpointer(tmp_path / "other")) == [1]
    assert committed(Checkpointer(tmp_path / "bad")) == [1]


# What is left, and what is asked for


def test_measurements_that_were_killed_are_collected(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(4)}).wait()
    with Checkpointer(tmp_path) as checkpoints:
        names = [".forebay-probe-0123abcd", ".forebay-probe-89abcdef", ".forebay-probe-other"]
        for name in names:
            (tmp_path / name / "sub").mkdir(parents=True)
            (tmp_path / name / "sub" / "data").write_bytes(b"x" * 100)
        for path in (tmp_path / names[0]).rglob("*"):
            os.utime(path, (1, 1))
        os.utime(tmp_path / names[0], (1, 1))
        (tmp_path / ".forebay-probe-fedcba98").symlink_to(tmp_path / "step-1")
        assert checkpoints.gc(dry_run=True) == [(names[0], 100)]
        assert (tmp_path / names[0]).is_dir()
        assert checkpoints.gc() == [(names[0], 100)]
        assert stall.collect_probes(tmp_path, 0) == [(names[1], 100)]
        left = sorted(os.listdir(tmp_path))
        assert left == [".forebay", ".forebay-probe-fedcba98", ".forebay-probe-other", "step-1"]
        assert committed(checkpoints) == [1]


@pytest.mark.parametrize(
    "rule", [{"keep_last": 0}, {"keep_every": 0}, {"keep_last": -1}, {"keep_last": 1.5}]
)
def test_rules_of_a_prune_are_checked(tmp_path: Path, rule: dict[str, Any]) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.ones(4)}).wait()
        with pytest.raises(forebay.UsageError, match=next(iter(rule))):
            checkpoints.prune(**rule)
        assert committed(checkpoints) == [1, 2]
