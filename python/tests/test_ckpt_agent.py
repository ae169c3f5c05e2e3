"""Checkpointer(agent=...): folders are handed to a `forebay agent` that runs, and trainers may die."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_cases import harness, tiers
from test_export import command

import forebay
from forebay import Checkpointer
from forebay._ckpt import agents

#: How long anything may take.
LONG_SECONDS = 60.0

CONFIG = """
[[tier]]
name = "local"
place = "local"
[[tier]]
name = "shared"
place = "shared"
[tiers]
look_every = "100 ms"
[agent]
socket = "agent.sock"
"""

#: Saves, and is killed before it can do anything else.
TRAINER = """
import os, signal, sys, torch
from forebay import Checkpointer
checkpoints = Checkpointer(sys.argv[1], agent=sys.argv[2])
checkpoints.save(1, {"w": torch.arange(100_000.0)}, blocking=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def site() -> Iterator[Path]:
    """A folder with a configuration, whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="fb"))
    (folder / "forebay.toml").write_text(CONFIG)
    (folder / "local").mkdir()
    (folder / "shared").mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(site: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts an agent; all are ended at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def begin() -> subprocess.Popen[bytes]:
        with open(site / "agent.log", "ab") as log:
            run = [command(), "agent", "--config", str(site / "forebay.toml")]
            agent = subprocess.Popen(run, stdout=log, stderr=log)
        started.append(agent)
        until(lambda: reached(site / "agent.sock"), lambda: (site / "agent.log").read_text())
        return agent

    yield begin
    for agent in started:
        agent.kill()
        agent.wait()


def reached(path: Path) -> bool:
    """Whether an agent listens."""
    with socket.socket(socket.AF_UNIX) as link:
        return link.connect_ex(str(path)) == 0


def until(holds: Callable[[], bool], told: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_SECONDS
    while not holds():
        assert time.monotonic() < end, told()
        time.sleep(0.03)


def lose(folder: Path) -> None:
    """Removes a folder in which an agent may be at work."""

    def is_gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    until(is_gone, lambda: list(folder.rglob("*")))


def state(seed: int) -> dict[str, Any]:
    return {"w": torch.full((50_000,), float(seed))}


def is_committed(folder: Path, step: int) -> bool:
    found = {one["step"]: one["state"] for one in Checkpointer(folder).steps()}
    return found.get(step) == "committed"


def test_a_trainer_that_is_killed_right_after_its_save(
    site: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    run = [sys.executable, "-c", TRAINER, str(site / "run7"), str(site / "agent.sock")]
    trainer = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    assert "Warning" not in trainer.stderr
    shared = site / "shared" / "run7"
    until(lambda: is_committed(shared, 1), lambda: (site / "agent.log").read_text())
    new = {"w": torch.zeros(100_000)}
    assert Checkpointer(shared).restore(new).step == 1
    assert torch.equal(new["w"], torch.arange(100_000.0))


def test_without_an_agent_training_goes_on_and_every_save_tries_again(
    site: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    with pytest.warns(UserWarning, match="no agent listens"):
        checkpoints = Checkpointer(site / "run7", agent=site / "agent.sock")
    with checkpoints:
        checkpoints.save(1, state(1), blocking=True)
        told = checkpoints.tier_status()
        assert "error[not_found]: no agent listens" in told["agent"]["error"], told
        assert told["agent"]["places"] == [] and told["tiers"] == []
        with pytest.raises(forebay.Error, match="no agent listens"):
            checkpoints.drain(1)
        agent = start()
        checkpoints.save(2, state(2))
        assert checkpoints.drain(LONG_SECONDS)
        told = checkpoints.tier_status()
        assert told["agent"]["error"] is None and told["agent"]["job"] == "run7"
        assert told["agent"]["places"][1] == str(site / "shared" / "run7")
        assert [step["copies"] for step in told["steps"]] == [["committed"] * 2] * 2
        # A new one knows nothing of the folder until the next save.
        agent.kill()
        agent.wait()
        start()
        told = checkpoints.tier_status()
        assert "no such job" in told["agent"]["error"], told
        checkpoints.save(3, state(3))
        checkpoints.wait()
        until(lambda: is_committed(site / "shared" / "run7", 3), checkpoints.tier_status)
        checkpoints.pause_tiers()
        assert checkpoints.tier_status()["tiers"][1]["paused"]


def test_with_tiers_restores_look_there_and_nothing_moves_here(
    site: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    near, far = site / "run7", site / "shared" / "run7"
    with Checkpointer(near, tiers=[far], agent=site / "agent.sock") as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.save(2, state(2))
        assert checkpoints.drain(LONG_SECONDS)
    lose(near)
    # The agent has the folder that is gone; this is another one, under the same name.
    with Checkpointer(near, tiers=[far], agent=site / "agent.sock") as checkpoints:
        assert checkpoints.latest() == 2
        new = state(0)
        assert checkpoints.restore(new).step == 2
        assert torch.equal(new["w"], state(2)["w"])
        checkpoints.save(3, new)
        assert checkpoints.drain(LONG_SECONDS)
        assert checkpoints.tier_status()["agent"]["error"] is None
    assert is_committed(far, 3)


def test_who_lost_the_folder_and_names_no_tiers_is_told_where_steps_are(
    site: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    near, far = site / "run7", site / "shared" / "run7"
    with Checkpointer(near, agent=site / "agent.sock") as checkpoints:
        checkpoints.save(1, state(1))
        assert checkpoints.drain(LONG_SECONDS)
    lose(near)
    with pytest.warns(UserWarning, match=f"has no step, and {far} has step 1: tiers="):
        Checkpointer(near, agent=site / "agent.sock").close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Checkpointer(near, agent=site / "agent.sock", tiers=[far]) as checkpoints:
            assert checkpoints.restore(state(0)).step == 1


def test_ranks_save_and_the_first_hands_over(
    site: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    for told in harness.run(tiers.saves_and_comes_back, 2, str(site), str(site / "agent.sock")):
        assert told == {"step": 2, "equal": True, "drained": True, "latest": 3, "far": [1, 2, 3]}


def test_nothing_moves_in_this_process_where_an_agent_is_to(site: Path) -> None:
    near, far = site / "run7", site / "shared" / "run7"
    with pytest.warns(UserWarning, match="not handed over"):
        checkpoints = Checkpointer(near, tiers=[far], agent=site / "agent.sock")
    with checkpoints:
        checkpoints.save(1, state(1), blocking=True)
        time.sleep(3.0)
        told = checkpoints.tier_status()
        assert "no agent listens" in told["agent"]["error"]
        assert [step["step"] for step in told["steps"]] == [1], "what is seen from here"
    assert not far.exists() or not is_committed(far, 1)


def test_an_agent_that_refuses_or_hangs_holds_up_nothing(
    site: Path, start: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    place: dict[str, Any] = {"agent": site / "agent.sock", "agent_job": "run7"}
    with Checkpointer(site / "one", **place):
        with pytest.warns(UserWarning, match="another folder is moved under that name"):
            other = Checkpointer(site / "two", **place)
    with other:
        other.save(1, state(1), blocking=True)
        assert "already_exists" in other.tier_status()["agent"]["error"]
    monkeypatch.setattr(agents, "_SERVICE_SOCKET", str(site / "agent.sock"))
    with pytest.warns(UserWarning, match="no agent listens(.|\n)*agent.sock.*there is one"):
        Checkpointer(site / "two", agent=site / "none.sock").close()
    monkeypatch.setattr(agents, "_PATIENCE_SECONDS", 0.5)
    with socket.socket(socket.AF_UNIX) as hangs:
        hangs.bind(str(site / "hangs.sock"))
        hangs.listen()
        began = time.monotonic()
        with pytest.warns(UserWarning, match="does not answer"):
            checkpoints = Checkpointer(site / "three", agent=site / "hangs.sock")
        with checkpoints:
            checkpoints.save(1, state(1), blocking=True)
        assert time.monotonic() - began < 20
    assert is_committed(site / "three", 1)


def test_the_configuration_says_where_the_agent_is(
    site: Path, start: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setenv("FOREBAY_CONFIG", str(site / "forebay.toml"))
    with Checkpointer(site / "run7", agent=True) as checkpoints:
        told = checkpoints.tier_status()
        assert told["agent"]["socket"] == str(site / "agent.sock")
        assert told["agent"]["error"] is None


def test_the_folder_of_the_configured_job_is_not_moved_twice(
    site: Path, start: Callable[[], subprocess.Popen[bytes]]
) -> None:
    start()
    with Checkpointer(site / "local", agent=site / "agent.sock") as checkpoints:
        checkpoints.save(1, state(1))
        assert checkpoints.drain(LONG_SECONDS)
        assert checkpoints.tier_status()["agent"]["job"] == "default"
    assert is_committed(site / "shared", 1)
    assert not (site / "shared" / "local").exists()


def test_what_cannot_be_handed_over_is_refused(tmp_path: Path) -> None:
    for odd in (7, b"x", ["x"], "", None):
        with pytest.raises(forebay.Error, match="path of a socket") as raised:
            Checkpointer(tmp_path, agent=odd)  # type: ignore[arg-type]
        assert raised.value.code == "usage"
    for name in ("", "a/b", ".hidden", "x" * 65):
        with pytest.raises(forebay.Error, match="a job's name"):
            Checkpointer(tmp_path, agent=True, agent_job=name)
    with pytest.raises(forebay.Error, match="keep_last"):
        Checkpointer(tmp_path, agent=True, keep_last=2)
    with pytest.raises(forebay.Error, match="handing over to an agent needs a folder"):
        Checkpointer("s3://bucket/run", agent=True)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_told_by_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot open the folder"):
        checkpoints = Checkpointer(tmp_path / "file" / "run7", agent=tmp_path / "none")
    with pytest.raises(forebay.Error):
        checkpoints.save(1, state(1), blocking=True)
