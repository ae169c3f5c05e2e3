"""Shadows: the same code on host memory, and on a GPU where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import same
from torch import nn

from forebay import Checkpointer
from forebay._ckpt import shadow as shadows
from forebay._ckpt import snapshot
from forebay._ckpt.shadow import ALIGN_BYTES, Peak, Shadow, size_of
from forebay._ckpt.snapshot import Snapshots
from forebay._ckpt.stall import Stall
from forebay._ckpt.training import Training


def test_copies_are_the_values_of_the_moment_in_memory_that_stays() -> None:
    shadow = Shadow(torch.device("cpu"))
    tensors = [
        torch.ones(5),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.zeros(0, 2),
        torch.tensor(7),
    ]
    copies = shadow.copy(tensors)
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.add_(1)
    for copy, tensor in zip(copies, before, strict=True):
        assert same(copy, tensor) and copy.is_contiguous()
    assert all(
        copy.data_ptr() % ALIGN_BYTES == shadow.buffer.data_ptr() % ALIGN_BYTES  # type: ignore[union-attr]
        for copy in copies
        if copy.numel()
    )
    again = shadow.copy(tensors)
    assert [copy.data_ptr() for copy in again] == [copy.data_ptr() for copy in copies]
    assert all(torch.equal(*pair) for pair in zip(again, tensors, strict=True))


def test_a_shadow_grows_and_is_given_back() -> None:
    shadow = Shadow(torch.device("cpu"))
    small, large = [torch.ones(10)], [torch.ones(10_000), torch.ones(3).bfloat16()]
    shadow.copy(small)
    assert shadow.bytes == size_of(small) == ALIGN_BYTES
    assert all(torch.equal(*pair) for pair in zip(shadow.copy(large), large, strict=True))
    assert shadow.bytes == size_of(large)
    # A smaller state uses the larger buffer.
    shadow.copy(small)
    assert shadow.bytes == size_of(large)
    shadow.release()
    assert shadow.bytes == 0
    assert shadow.copy(small)[0].tolist() == [1] * 10


def test_host_memory_is_read_where_it_lies_when_it_can_be() -> None:
    snapshots = Snapshots("auto", staging_bytes=1000)
    weight = nn.Parameter(torch.ones(4, 4))
    view = torch.arange(6.0).reshape(2, 3).t()
    taken = snapshots.take([weight, view], blocking=False)
    assert taken.mode == "pool" and not taken.settled and taken.places == b"\0\0"
    assert taken.addresses[0] == weight.data_ptr() and taken.addresses[1] != view.data_ptr()
    assert taken.stream is None and torch.equal(taken.keep[1], view)
    assert snapshots.take([torch.ones(300)], blocking=False).mode == "stream"
    assert snapshots.take([torch.ones(300)], blocking=True).mode == "in place"


def test_stalls_follow_from_rates() -> None:
    stall = Stall(copy_rate=10e9, write_rate=2e9)
    assert stall.predict("pool", 8 * 10**9, 10, 8 * 10**9) == pytest.approx(0.8)
    assert stall.predict("stream", 8 * 10**9, 10, 2 * 10**9) == pytest.approx(3.0)
    # A fast disk: the copies are what takes long.
    stall.write_rate = 100e9
    assert stall.predict("stream", 8 * 10**9, 10, 2 * 10**9) == pytest.approx(0.8)
    shadow = stall.predict("shadow", 8 * 10**9, 1000, 0)
    assert shadow is not None and shadow < 0.02
    assert Stall().predict("pool", 1, 1, 1) is None
    stall.learn({"tensor_bytes": 10**9, "snapshot": "pool", "staged_seconds": 0.5})
    assert stall.copy_rate == 2e9
    # Small saves tell nothing about rates.
    stall.learn({"tensor_bytes": 10, "snapshot": "pool", "staged_seconds": 0.5})
    assert stall.copy_rate == 2e9


GIB = 1 << 30


class Allocator:
    """What torch's allocator and the driver would say of a GPU of 64 GiB."""

    total = 64 * GIB

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.peak = self.others = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: self.peak)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.used)
        free = lambda _: (self.total - self.used - self.others, self.total)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "mem_get_info", free)

    def train(self, most: int) -> None:
        """A step that takes so much beside what is in use."""
        self.peak = max(self.peak, self.used + most)

    def reset(self) -> None:
        self.peak = self.used


def test_a_peak_outlives_resets_and_leaves_shadows_out(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    peak = Peak(torch.device("cuda", 0))
    allocator.used = 10 * GIB
    allocator.train(30 * GIB)
    peak.look()
    assert peak.bytes == 40 * GIB
    allocator.reset()
    peak.look()
    assert peak.bytes == 40 * GIB
    # A shadow of 8 GiB is made, and training takes a little more than before.
    allocator.used += 8 * GIB
    peak.shadow_is(8 * GIB)
    allocator.train(31 * GIB)
    peak.look()
    assert peak.bytes == 41 * GIB
    assert shadows.headroom(peak.device, peak.bytes) == 64 * GIB - 41 * GIB - 4 * GIB
    # It goes again: what torch says is from before that.
    allocator.used -= 8 * GIB
    peak.shadow_is(0)
    peak.look()
    assert peak.bytes == 41 * GIB
    allocator.reset()
    allocator.train(35 * GIB)
    peak.look()
    assert peak.bytes == 45 * GIB
    allocator.others = 10 * GIB
    assert shadows.headroom(peak.device, peak.bytes) == 64 * GIB - 10 * GIB - 45 * GIB - 4 * GIB


def _on_pretended_gpu(monkeypatch: pytest.MonkeyPatch, shadow: bool | str) -> Snapshots:
    """Snapshots that take host memory for that of a GPU."""
    monkeypatch.setattr(Snapshots, "_is_here", lambda *_: True)
    monkeypatch.setattr(snapshot, "_stream_of", lambda _: 7)
    return Snapshots(shadow, staging_bytes=1 << 20)  # type: ignore[arg-type]


def test_an_automatic_shadow_waits_until_training_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    tensors = [torch.ones(1000)]
    # At step 0 nobody knows what a step takes, however much is free.
    snapshots = _on_pretended_gpu(monkeypatch, "auto")
    assert snapshots.take(tensors, blocking=False).mode == "pool"
    assert snapshots.take(tensors, blocking=False).mode == "shadow"
    # Whoever says that a step has run, or whose hook has, gets one at once; by name anybody does.
    for shadow, stepped in (("auto", True), (True, False)):
        snapshots = _on_pretended_gpu(monkeypatch, shadow)
        snapshots.training.stepped = stepped
        taken = snapshots.take(tensors, blocking=False)
        assert taken.mode == "shadow" and taken.settled and taken.stream == 7
        assert snapshots.training.peaks[torch.device("cpu")].shadow_bytes == size_of(tensors)
    snapshots.release()
    assert snapshots.training.peaks[torch.device("cpu")].shadow_bytes == 0
    # A peak that the program has reset before the save was seen by the hook.
    snapshots = _on_pretended_gpu(monkeypatch, "auto")
    assert snapshots.take(tensors, blocking=False).mode == "pool"
    allocator.train(63 * GIB)
    snapshots.training.before_step()
    allocator.reset()
    assert snapshots.take(tensors, blocking=False).mode == "pool"
    assert "to spare" in (snapshots.told or "")


def test_a_hook_tells_that_training_has_run() -> None:
    training, parameter = Training(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.register_step_pre_hook(training.before_step)
    assert not training.stepped
    optimizer.step()
    assert training.stepped


def _state(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 256, device=device)).square().mean().backward()
    optimizer.step()
    extra = {
        "half": torch.randn(33, 7, device=device).half().t(),
        "scalar": torch.tensor(3.0, device=device),
        "host": torch.arange(10.0),
        "empty": torch.zeros(0, 3, device=device),
    }
    return {"model": model, "optim": optimizer, "extra": extra, "epoch": 1}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shadow", "staging", "mode"),
    [(True, "1MiB", "shadow"), (False, "64MiB", "pool"), (False, "1MiB", "stream")],
)
def test_a_gpu_state_is_what_it_was_at_the_call(
    tmp_path: Path, shadow: bool, staging: str, mode: str
) -> None:
    with Checkpointer(tmp_path, shadow=shadow, staging_bytes=staging) as checkpoints:
        for step in range(3):
            state = _state("cuda")
            wanted = {name: one.clone() for name, one in state["model"].state_dict().items()}
            half = state["extra"]["half"].clone()
            handle = checkpoints.save(step, state)
            with torch.no_grad():
                for parameter in state["model"].parameters():
                    parameter.zero_()
                state["extra"]["half"].zero_()
                state["extra"]["host"].zero_()
            assert handle.result(60)["snapshot"] == mode
            for device in ("cuda", "cpu"):
                blank = _state(device)
                for tensor in blank["extra"].values():
                    tensor.fill_(-1)
                checkpoints.restore(blank, step)
                found = blank["model"].state_dict()
                assert all(torch.equal(found[name].cuda(), one) for name, one in wanted.items())
                assert torch.equal(blank["extra"]["half"].cuda(), half)
                assert blank["extra"]["host"].tolist() == list(range(10))


@pytest.mark.gpu
def test_the_first_save_with_a_shadow_holds_up_training_for_milliseconds(tmp_path: Path) -> None:
    state = {f"w{number}": torch.ones(16 << 20, device="cuda") for number in range(16)}
    torch.cuda.synchronize()
    with Checkpointer(tmp_path, shadow=True, staging_bytes="256MiB", state=state) as checkpoints:
        assert checkpoints.predicted_stall_s is not None and checkpoints.predicted_stall_s < 0.05
        report = checkpoints.save(1, state).result(120)
        assert report["snapshot"] == "shadow"
        # Timed thresholds are the benches'; this one only tells a shadow from a wait for the disk.
        assert report["stall_seconds"] < report["durable_seconds"]
        before = torch.cuda.memory_allocated()
        checkpoints.release()
        assert before - torch.cuda.memory_allocated() >= 1 << 30


@pytest.mark.gpu
def test_gpu_memory_of_shadows_comes_back(tmp_path: Path) -> None:
    state = {f"w{number}": torch.ones(8 << 20, device="cuda") for number in range(8)}
    with Checkpointer(tmp_path, shadow=True, staging_bytes="64MiB") as checkpoints:
        before = torch.cuda.memory_allocated()
        for step in range(2):
            assert checkpoints.save(step, state).result(60)["snapshot"] == "shadow"
        assert torch.cuda.memory_allocated() - before >= 256 << 20
        checkpoints.release()
        assert torch.cuda.memory_allocated() - before < 1 << 20
        # The next save takes it again, and the end of a checkpointer gives it back too.
        assert checkpoints.save(2, state).result(60)["snapshot"] == "shadow"
    assert torch.cuda.memory_allocated() - before < 1 << 20
    checkpoints.restore(state, 2)
    assert all(bool((one == 1).all()) for one in state.values())


@pytest.mark.gpu
def test_the_first_save_of_a_process_takes_no_shadow_by_itself(tmp_path: Path) -> None:
    state = _state("cuda")
    with Checkpointer(tmp_path / "first", staging_bytes="64MiB") as checkpoints:
        modes = [checkpoints.save(step, state).result(60)["snapshot"] for step in range(2)]
        assert modes == ["pool", "shadow"]
    with Checkpointer(tmp_path / "prepared", staging_bytes="64MiB") as checkpoints:
        checkpoints.prepare(state)
        # A program that measures its own peaks takes nothing away.
        torch.cuda.reset_peak_memory_stats()
        assert checkpoints.save(1, state).result(60)["snapshot"] == "shadow"


@pytest.mark.gpu
def test_what_no_hook_answers_for_is_copied_from_a_gpu_first(tmp_path: Path) -> None:
    state = _state("cuda")
    optimizer = state["optim"]
    with Checkpointer(tmp_path, shadow=False, staging_bytes="8MiB") as checkpoints:
        checkpoints.attach(optimizer)
        wanted = state["extra"]["half"].clone()
        handle = checkpoints.save(1, state)
        state["extra"]["half"].zero_()
        optimizer.step()
        handle.wait(60)
        blank = {"extra": {"half": torch.zeros_like(wanted)}}
        checkpoints.restore(blank, 1, strict=False)
        assert torch.equal(blank["extra"]["half"], wanted)


@pytest.mark.gpu
def test_a_shadow_that_does_not_fit_is_told_and_done_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay._ckpt import snapshot

    monkeypatch.setattr(snapshot, "headroom", lambda device, peak: 1000)
    with Checkpointer(tmp_path, staging_bytes="64MiB") as checkpoints:
        for step in range(2):
            report = checkpoints.save(step, _state("cuda")).result(60)
            assert report["snapshot"] == "pool"
    assert caplog.text.count("no shadow of the state") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True])
def test_a_stager_copies_from_a_gpu_into_pinned_memory(share: bool) -> None:
    from forebay.dcp import Stager

    stager = Stager(asynchronous=True, share_memory=share)
    for value in range(3):
        tensor = torch.full((1 << 20,), float(value), device="cuda")
        future = stager.stage({"w": tensor, "host": torch.ones(2)})
        staged = future.result(30)
        tensor.fill_(-1)
        assert staged["w"].is_cpu and staged["w"].is_pinned()
        assert staged["w"].unique().tolist() == [value]
        del staged, future
    stager.close()
