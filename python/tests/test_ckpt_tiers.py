"""Checkpointer with tiers: steps go on by themselves, come back from the nearest copy, and wait for room."""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import buckets
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_cases import harness, tiers

import forebay
from forebay import Checkpointer


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(500, 200, generator=generator), "step": seed}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(500, 200), "step": -1}


def committed(folder: Path) -> list[int]:
    return [one["step"] for one in Checkpointer(folder).steps() if one["state"] == "committed"]


def files(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def test_steps_go_to_all_tiers_and_torch_reads_them_there(tmp_path: Path) -> None:
    near, shared, far = (tmp_path / name for name in ("near", "shared", "far"))
    with Checkpointer(near, tiers=[shared, {"place": far, "takes": "every 2"}]) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step))
        assert checkpoints.drain(60)
        status = checkpoints.tier_status()
    assert [tier["health"] for tier in status["tiers"]] == ["ok", "ok", "ok"]
    assert [step["copies"][2] for step in status["steps"]] == ["absent", "committed", "absent"]
    assert committed(shared) == [1, 2, 3] and committed(far) == [2]
    assert files(far / "step-2") == files(near / "step-2") == files(shared / "step-2")
    theirs = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(theirs, checkpoint_id=str(far / "step-2"))
    assert torch.equal(theirs["w"], state(2)["w"])


def test_what_the_first_tier_has_lost_comes_from_the_next_and_the_line_goes_on(
    tmp_path: Path,
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(near, tiers=[far]) as checkpoints:
        checkpoints.save(1, state(1), per_rank={"rng": 7}, side_files={"note.txt": b"hello"})
        checkpoints.save(2, state(2))
        assert checkpoints.drain(60)
    shutil.rmtree(near)
    with Checkpointer(near, tiers=[far]) as checkpoints:
        assert checkpoints.latest() == 2
        new = blank()
        assert checkpoints.restore(new).step == 2
        assert torch.equal(new["w"], state(2)["w"]) and new["step"] == 2
        assert checkpoints.per_rank(1) == {"rng": 7}
        assert checkpoints.side_files(1) == {"note.txt": b"hello"}
        checkpoints.save(3, new)
        assert checkpoints.drain(60)
        assert checkpoints.latest() == 3
        # One line: what was before counts as before, not as left behind.
        dropped = Checkpointer(far).prune(keep_last=1, grace_s=0)
    assert dropped["unpublished"] == [1, 2] and dropped["off_line"] == []


def test_a_damaged_copy_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(near, tiers=[far]) as checkpoints:
        checkpoints.save(1, state(1))
        assert checkpoints.drain(60)
        next(near.glob("step-1/*.distcp")).unlink()
        new = blank()
        with pytest.warns(UserWarning, match="passed over"):
            assert checkpoints.restore(new).step == 1
        assert torch.equal(new["w"], state(1)["w"])


def test_the_rules_of_the_first_tier_hold_and_a_save_without_room_is_left_out(
    tmp_path: Path,
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    text = f"""
        [[tier]]
        name = "near"
        place = "{near}"
        keep_last = 1
        capacity = "1 MB"
        [[tier]]
        name = "far"
        place = "{far}"
        [tiers]
        backlog = "skip"
        grace = 0
        look_every = "50 ms"
        """
    file = tmp_path / "forebay.toml"
    file.write_text(text)
    with Checkpointer(near, tiers=file) as checkpoints:
        checkpoints.save(1, state(1), blocking=True)
        checkpoints.pause_tiers()
        checkpoints.save(2, state(2), blocking=True)
        until = time.monotonic() + 30
        while checkpoints.tier_status()["tiers"][0]["health"] != "full":
            assert time.monotonic() < until, checkpoints.tier_status()
            time.sleep(0.02)
        assert checkpoints.save(3, state(3), blocking=True).skipped
        checkpoints.pause_tiers(False)
        assert checkpoints.drain(60)
        assert not checkpoints.save(4, state(4), blocking=True).skipped
        assert checkpoints.drain(60)
    assert committed(far) == [1, 2, 4] and committed(near) == [4]


def test_places_may_have_any_text_in_their_names(tmp_path: Path) -> None:
    near = tmp_path / "near"
    far = [tmp_path / name for name in ("😀", 'a "b" \\ c', "d\x7fe", "é\u2028f")]
    capped = {"place": tmp_path / "g", "capacity": 10**18, "write_limit": 1e12, "keep_last": 2}
    with Checkpointer(near, tiers=[*far, capped]) as checkpoints:
        checkpoints.save(1, state(1))
        assert checkpoints.drain(60)
    for folder in [*far, tmp_path / "g"]:
        assert files(folder / "step-1") == files(near / "step-1")


def test_ranks_restore_what_rank_0_has_chosen(tmp_path: Path) -> None:
    for told in harness.run(tiers.saves_and_comes_back, 2, str(tmp_path)):
        assert told == {"step": 2, "equal": True, "drained": True, "latest": 3, "far": [1, 2, 3]}


def test_a_bucket_is_reached_as_its_tier_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, endpoint = buckets.start(tmp_path)
    try:
        for name, value in buckets.variables(endpoint).items():
            if name != "AWS_ENDPOINT_URL":
                monkeypatch.setenv(name, value)
        bucket = {"place": buckets.fresh(), "store": {"endpoint": endpoint}}
        near = tmp_path / "near"
        with Checkpointer(near, tiers=[bucket]) as checkpoints:
            checkpoints.save(1, state(1))
            assert checkpoints.drain(120)
        shutil.rmtree(near)
        with Checkpointer(near, tiers=[bucket]) as checkpoints:
            new = blank()
            assert checkpoints.restore(new).step == 1
            assert torch.equal(new["w"], state(1)["w"])
    finally:
        server.kill()


def test_tiers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    near = tmp_path / "near"
    with pytest.raises(forebay.Error, match="keep_last"):
        Checkpointer(near, tiers=[tmp_path / "far"], keep_last=2)
    with pytest.raises(forebay.Error, match="no such configuration") as raised:
        Checkpointer(near, tiers=tmp_path / "none.toml")
    assert raised.value.code == "not_found"
    with pytest.raises(forebay.Error, match="capcity"):
        Checkpointer(near, tiers=[{"place": tmp_path / "far", "capcity": 1}])
    with pytest.raises(forebay.Error, match="place"):
        Checkpointer(near, tiers=[{"name": "far"}])
    for wrong in ("endpoint=http://localhost", None, ["endpoint"]):
        with pytest.raises(forebay.Error, match="store is"):
            Checkpointer(near, tiers=[{"place": tmp_path / "far", "store": wrong}])
    with pytest.raises(forebay.Error, match="inf"):
        Checkpointer(near, tiers=[{"place": tmp_path / "far", "capacity": float("inf")}])
    with pytest.raises(forebay.Error, match="UTF-8"):
        Checkpointer(near, tiers=[{"place": str(tmp_path / "far\udcff")}])
    file = tmp_path / "forebay.toml"
    file.write_text('[[tier]]\nname = "a"\nplace = "/elsewhere"\n')
    with pytest.raises(forebay.Error, match="/elsewhere"):
        Checkpointer(near, tiers=file)
    file.write_text(f'[[tier]]\nname = "a"\nplace = "{near}"\n[tiers]\nbacklog = "straight"\n')
    with pytest.raises(forebay.Error, match="straight"):
        Checkpointer(near, tiers=file)
    with pytest.raises(forebay.Error, match="no tiers"):
        Checkpointer(near).tier_status()
    with Checkpointer(near, tiers=[tmp_path / "far"]) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(forebay.Error) as missing:
            checkpoints.restore(blank())
        assert missing.value.code == "not_found"


def test_a_tier_that_is_down_is_told_in_the_log_of_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = tmp_path / "no" / "mount"

    def lines() -> list[str]:
        told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        return [line for line in told if "tier tier1" in line]

    with caplog.at_level("WARNING", logger="forebay"):
        with Checkpointer(tmp_path / "near", tiers=[lost]) as checkpoints:
            step = 0
            until = time.monotonic() + 60
            while not lines() and time.monotonic() < until:
                step += 1
                checkpoints.save(step, state(step), blocking=True)
                time.sleep(0.2)
            checkpoints.save(step + 1, state(1), blocking=True)
            time.sleep(0.5)
            assert len(lines()) == 1 and f"({lost}) is down: " in lines()[0], lines()
            lost.parent.mkdir()
            until = time.monotonic() + 60
            while len(lines()) < 2 and time.monotonic() < until:
                step += 1
                checkpoints.save(step + 1, state(1), blocking=True)
                time.sleep(0.2)
            assert "is ok again" in lines()[1]
