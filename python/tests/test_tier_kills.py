"""Trainer, agent and S3 server are killed while checkpoints drain: a short run of `bench/host/tier_kills.py`."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from test_export import command

HOST = Path(__file__).resolve().parents[2] / "bench" / "host"


def server() -> str:
    """The program, which `cargo xtask test` builds. Skips the test where there is none."""
    program = os.environ.get("FOREBAY_TEST_S3S", "")
    if not shutil.which(program):
        assert os.environ.get("FOREBAY_NO_SKIP") != "1", "FOREBAY_TEST_S3S is missing"
        pytest.skip("FOREBAY_TEST_S3S names no server; `cargo xtask test` builds it")
    return program


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, where the sources are."""
    if not (HOST / "tier_kills.py").is_file():
        pytest.skip("the benches are not here")
    monkeypatch.setattr(sys, "path", [str(HOST), *sys.path])
    return importlib.import_module("tier_kills")


def test_steps_arrive_though_trainer_agent_and_server_are_killed(kills: Any) -> None:
    program = server()
    # Two parts a step, and so many kills that each of the three is among them.
    plan = kills.Plan(
        seed=20261130, kills=18, steps=3, step_bytes=12 << 20, pause_s=(0.1, 0.6), grace_s=1
    )
    told = kills.run(plan, command(), program)
    assert told["failed"] == [], told
    assert told["steps"] == 3 and all(told["killed"].values()), told
    assert told["kills_with_steps_under_way"] > 0, told
