"""Checkpointer(survive=True): what was staged is finished by a `forebay agent` where its processes die."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_cases import harness, survive
from test_ckpt_agent import site, start, until
from test_export import command

import forebay
from forebay import Checkpointer
from forebay._ckpt import stagedmemory, survival

__all__ = ["site", "start"]

Start = Callable[[], "subprocess.Popen[bytes]"]

#: How the attempts of agents are called.
BY_AGENT = re.compile(r"[0-9a-f]{8}-8000000[0-9a-f]\Z")


def program(site: Path, how: str) -> dict[str, Any]:
    """A trainer, for `subprocess`."""
    run = [sys.executable, "-m", "ckpt_cases.survive", str(site / "run7"), str(site / "agent.sock")]
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return {"args": [*run, how], "text": True, "env": {**os.environ, "PYTHONPATH": here}}


def dies(site: Path, how: str) -> None:
    """Runs a trainer that is killed."""
    trainer = subprocess.run(**program(site, how), capture_output=True, timeout=120, check=False)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    assert "Warning" not in trainer.stderr


def again(site: Path) -> Checkpointer:
    return Checkpointer(site / "run7", agent=site / "agent.sock", survive=True)


def staged(site: Path) -> list[dict[str, Any]]:
    """What the agent keeps or finishes."""
    run = [command(), "tier", "jobs", "--json", "--config", str(site / "forebay.toml")]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    return [save for line in json.loads(shown) for save in line["staged"]]


def attempt(folder: Path, step: int) -> str:
    """The attempt of a committed step, by the name of its manifest."""
    (manifest,) = (folder / f"step-{step}").glob("forebay.manifest-*")
    return manifest.name.removeprefix("forebay.manifest-").partition("_")[0]


@pytest.mark.parametrize("how", ["staged", "returned"])
def test_a_trainer_that_is_killed_in_a_save_has_saved(site: Path, start: Start, how: str) -> None:
    start()
    dies(site, how)
    new, own = survive.state(9), {"own": torch.zeros(9)}
    if how == "returned":
        new["more"] = torch.zeros(50_000_000)
    with again(site) as checkpoints:
        # Asked right after the crash: it waits.
        assert checkpoints.latest() == 2, (site / "agent.log").read_text()
        assert BY_AGENT.match(attempt(site / "run7", 2))
        assert checkpoints.restore(new, per_rank=own).step == 2
        assert survive.alike(new, survive.state(2))
        assert torch.equal(own["own"], torch.arange(9.0))
        assert checkpoints.side_files()["notes.txt"] == b"two"
        if how == "returned":
            assert torch.equal(new["more"], torch.full((50_000_000,), 2.5))
        checkpoints.save(3, new)
        checkpoints.wait()
        assert checkpoints.latest() == 3
    assert staged(site) == []


def test_no_kill_loses_a_step_whose_save_had_returned(site: Path, start: Start) -> None:
    start()
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    newest = 0
    for _ in range(20 if os.environ.get("FOREBAY_FULL") == "1" else 3):
        trainer = subprocess.Popen(**program(site, "goes on"), stdout=subprocess.PIPE)
        assert trainer.stdout is not None
        with trainer.stdout as told:
            restored = told.readline()
            assert restored and int(restored) >= newest, f"seed {seed}: {newest}"
            time.sleep(moments.random())
            trainer.kill()
            # The last line may have been cut.
            lines = [restored, *told.read().split("\n")[:-1]]
        assert trainer.wait(60) == -signal.SIGKILL
        newest = int(lines[-1])
    with again(site) as checkpoints:
        latest, new = checkpoints.latest() or 0, survive.state(0)
        assert latest >= newest, f"seed {seed}: {newest}"
        checkpoints.restore(new)
        assert survive.alike(new, survive.state(latest)), f"seed {seed}"


def test_what_died_in_the_copy_leaves_the_step_before(site: Path, start: Start) -> None:
    start()
    dies(site, "copy")
    with again(site) as checkpoints:
        began = time.monotonic()
        assert checkpoints.latest() == 1
        new = survive.state(9)
        assert checkpoints.restore(new).step == 1
        assert time.monotonic() - began < 5, "nothing is waited for"
        assert survive.alike(new, survive.state(1))
    assert staged(site) == []


def test_ranks_that_are_all_killed_have_saved(site: Path, start: Start) -> None:
    start()
    place = str(site / "run7"), str(site / "agent.sock")
    assert harness.run(survive.rank_dies, 2, *place, True) == [None, None]
    told = harness.run(survive.rank_comes_back, 2, *place)
    assert told == [{"latest": 2, "step": 2, "equal": True, "after": 3}] * 2
    assert BY_AGENT.match(attempt(site / "run7", 2))
    assert staged(site) == []


def test_a_rank_that_staged_nothing_leaves_the_step_before_and_is_not_waited_for(
    site: Path, start: Start
) -> None:
    start()
    place = str(site / "run7"), str(site / "agent.sock")
    assert harness.run(survive.rank_dies, 2, *place, False) == [None, None]
    until(lambda: bool(staged(site)) and staged(site)[0]["begun"] == 1, lambda: staged(site))
    began = time.monotonic()
    told = harness.run(survive.rank_comes_back, 2, *place)
    # A retry of step 2, of the newer run.
    assert told == [{"latest": 1, "step": 1, "equal": True, "after": 2}] * 2
    assert time.monotonic() - began < 45
    assert not BY_AGENT.match(attempt(site / "run7", 2))
    until(lambda: staged(site) == [], lambda: staged(site))


def test_a_rank_that_lives_leaves_its_part_to_the_agent_too(site: Path, start: Start) -> None:
    start()
    place = str(site / "run7"), str(site / "agent.sock")
    told = harness.run(survive.one_rank_dies, 2, *place)
    assert told == [{"error": "timeout"}, None]
    until(lambda: staged(site) == [], lambda: staged(site))
    told = harness.run(survive.rank_comes_back, 2, *place)
    assert told == [{"latest": 2, "step": 2, "equal": True, "after": 3}] * 2


def test_ends_leave_nothing_and_memory_is_kept_from_save_to_save(site: Path, start: Start) -> None:
    start()
    with again(site) as checkpoints:
        checkpoints.prepare(survive.state(1))
        files = {os.fstat(checkpoints._opened().snapshots.staged.file).st_ino}
        for step in (1, 2, 3):
            state = survive.state(step)
            handle = checkpoints.save(step, state)
            assert handle.staged(0)
            state["wide"].zero_()
            assert handle.result()["snapshot"] == "staged"
            assert checkpoints._run is not None
            files.add(os.fstat(checkpoints._run.snapshots.staged.file).st_ino)
            assert staged(site) == []
        assert len(files) == 1
        new = survive.state(9)
        checkpoints.restore(new)
        assert survive.alike(new, survive.state(3))
        assert checkpoints.save(4, state, blocking=True).result()["snapshot"] == "in place"
        memory = checkpoints._opened().snapshots.staged
    assert memory.file == -1 and memory.buffer is None
    assert "died" not in (site / "agent.log").read_text()


def test_a_child_of_a_fork_does_not_keep_its_parent_alive(site: Path, start: Start) -> None:
    start()
    script = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from ckpt_cases import survive
from forebay import Checkpointer
from forebay._ckpt.survival import Link
checkpoints = Checkpointer({str(site / "run7")!r}, agent={str(site / "agent.sock")!r}, survive=True)
checkpoints.save(1, survive.state(1)).wait()
hand_over = Link.hand_over
def fork_and_die(self, memory, bequest):
    hand_over(self, memory, bequest)
    if os.fork() == 0:
        time.sleep(200)
        os._exit(0)
    survive.die()
Link.hand_over = fork_and_die
checkpoints.save(2, survive.state(2))
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    assert trainer.wait(120) == -signal.SIGKILL
    try:
        checkpoints = again(site)
        until(lambda: checkpoints.latest() == 2, lambda: (site / "agent.log").read_text())
        assert BY_AGENT.match(attempt(site / "run7", 2))
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)


def test_without_agent_or_memory_saves_are_as_without(
    site: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survival, "_AGAIN_SECONDS", 0.0)
    with pytest.warns(UserWarning, match="not handed over"):
        checkpoints = again(site)
    with checkpoints:
        with pytest.warns(UserWarning, match="does not survive(.|\n)*no agent listens"):
            assert checkpoints.save(1, survive.state(1)).result()["snapshot"] == "pool"
        # Once.
        assert checkpoints.save(2, survive.state(2)).result()["snapshot"] == "pool"
        start()
        assert checkpoints.save(3, survive.state(3)).result()["snapshot"] == "staged"
        monkeypatch.setattr(stagedmemory, "_SHARE", 0.0)
        checkpoints.release()
        with pytest.warns(UserWarning, match="no memory to stage in(.|\n)*bytes are needed"):
            assert checkpoints.save(4, survive.state(4)).result()["snapshot"] == "pool"
    new = survive.state(9)
    Checkpointer(site / "run7").restore(new)
    assert survive.alike(new, survive.state(4))


def test_an_agent_that_refuses_is_told_at_the_end_of_the_save(site: Path, start: Start) -> None:
    text = (site / "forebay.toml").read_text()
    (site / "forebay.toml").write_text(text + 'staged_limit = "1 MB"\n')
    start()
    with again(site) as checkpoints:
        handle = checkpoints.save(1, survive.state(1))
        with pytest.warns(UserWarning, match="does not survive(.|\n)*1000000 is the most"):
            handle.wait()
            # The warning is of the thread that sees to the end.
            checkpoints.close()
        assert checkpoints.save(2, survive.state(2)).result()["snapshot"] == "pool"


def test_what_is_staged_is_a_copy_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagedmemory, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    complex_ = torch.randn(50, dtype=torch.complex64)
    tensors = [
        torch.randn(777, 33),
        torch.randn(20, 30).t(),
        complex_.conj(),
        complex_.conj().imag,
        torch.randn(999).bfloat16(),
        torch.zeros(0, 3),
        torch.tensor(True),
    ]
    memory = stagedmemory.StagedMemory(torch.device("cpu"))
    for _ in range(2):
        copies = memory.stage(tensors)
        assert all(torch.equal(*pair) for pair in zip(copies, tensors, strict=True))
        assert not any(copy.is_conj() or copy.is_neg() for copy in copies)
        for tensor in tensors:
            tensor.zero_()
    offsets = memory.offsets(copies)
    assert offsets[1] >= 777 * 33 * 4 and max(offsets) < memory.bytes
    assert os.fstat(memory.file).st_size == memory.bytes
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file, 0)
    memory.release()
    assert memory.file == -1


def test_an_agent_that_stands_still_keeps_no_memory_that_is_used_again(
    site: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survival, "_ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(survival, "_AGAIN_SECONDS", 0.0)
    agent = start()
    with again(site) as checkpoints:
        checkpoints.save(1, survive.state(1)).wait()
        agent.send_signal(signal.SIGSTOP)
        memory = checkpoints._opened().snapshots.staged
        try:
            with pytest.warns(UserWarning, match="did not answer at the end of a save"):
                assert checkpoints.save(2, survive.state(2)).result()["snapshot"] == "staged"
                until(lambda: memory.file == -1, lambda: "the memory is kept for the next save")
        finally:
            agent.send_signal(signal.SIGCONT)
        # It reads all that was sent, and finds that nobody has died.
        checkpoints.save(3, survive.state(3)).wait()
        until(lambda: staged(site) == [], lambda: staged(site))
        log = (site / "agent.log").read_text()
        assert "has died" not in log and "has ended" not in log, log
        assert attempt(site / "run7", 2) != attempt(site / "run7", 3)
        assert not BY_AGENT.match(attempt(site / "run7", 2))


def test_a_child_of_a_fork_unmaps_nothing_of_its_own() -> None:
    # The child maps something where its parent's memory was, and lets go of what it has inherited.
    script = """
import ctypes, gc, mmap, os, torch
from forebay._ckpt.stagedmemory import StagedMemory
memory = StagedMemory(torch.device("cpu"))
copies = memory.stage([torch.arange(5_000_000.0)])
start, size = memory.buffer.data_ptr(), memory.bytes
child = os.fork()
if child == 0:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    fixed = 0x100000  # MAP_FIXED_NOREPLACE
    place = ctypes.c_void_p(start), ctypes.c_size_t(size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    got = libc.mmap(*place, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, ctypes.c_long(0))
    assert got == start, (got, ctypes.get_errno())
    ctypes.memset(start, 7, size)
    copies.clear()
    memory.release()
    del memory
    gc.collect()
    assert ctypes.string_at(start, size) == bytes([7]) * size
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(copies[0], torch.arange(5_000_000.0))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_child_of_a_fork_has_no_connection_that_is_just_being_made(
    site: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    ends: list[int] = []

    class Forks(socket.socket):
        def connect(self, address: Any) -> None:
            super().connect(address)
            child = os.fork()
            if child == 0:
                is_open = os.path.exists(f"/proc/self/fd/{self.fileno()}") and self.fileno() >= 0
                os._exit(1 if is_open else 0)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    checkpoints = again(site)
    keeper = checkpoints._settings.survival
    assert keeper is not None
    monkeypatch.setattr(socket, "socket", Forks)
    link = keeper.connect()
    assert link is not None
    link.close()
    assert ends == [0]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(forebay.Error, match="there is no agent") as raised:
        Checkpointer(tmp_path, survive=True)
    assert raised.value.code == "usage"
    drive: dict[str, Any] = {"agent": True, "records": tmp_path / "records", "tiers": [tmp_path]}
    with pytest.raises(forebay.Error, match="drives of nodes"):
        Checkpointer(tmp_path / "drive", survive=True, **drive)
    with pytest.raises(forebay.Error, match="survive is 1"):
        Checkpointer(tmp_path, agent=True, survive=1)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_state_of_a_gpu_is_staged_at_once(site: Path, start: Start) -> None:
    start()
    with again(site) as checkpoints:
        state = survive.state(1, device="cuda")
        state["large"] = torch.arange(100_000_000.0, device="cuda")
        for step in (1, 2):
            handle = checkpoints.save(step, state)
            state["large"].add_(1.0)
            assert handle.result()["snapshot"] == "staged"
        run = checkpoints._run
        assert run is not None and run.snapshots.staged.pinned
        assert run.snapshots.device_shadow is None
        new = {**survive.state(9, device="cuda"), "large": torch.zeros(100_000_000, device="cuda")}
        assert checkpoints.restore(new).step == 2
        assert torch.equal(new["large"], torch.arange(100_000_000.0, device="cuda") + 1.0)
        assert survive.alike(new, survive.state(1))
