"""Checkpointer with a first tier on the drives of nodes: node-complete sets, one commit for all, the way back."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_cases import harness, nodes

import forebay
from forebay import Checkpointer

WORLD = 4


def data_of(folder: Path, step: int) -> set[int]:
    """Ranks whose data files are in a folder."""
    found = (folder / f"step-{step}").glob("*.distcp")
    return {int(one.name.split("_")[1]) for one in found}


def run(case: Any, folder: Path, *more: Any, world: int = WORLD) -> list[Any]:
    return harness.run(case, world, world, str(folder), *more)


def test_each_node_keeps_its_own_and_brings_it_to_all(tmp_path: Path) -> None:
    results = run(nodes.saves_and_drains, tmp_path)
    assert all(result["drained"] and result["latest"] == 2 for result in results)
    status = results[0]["status"]
    assert [tier["health"] for tier in status["tiers"]] == ["ok", "ok"]
    assert [step["copies"] for step in status["steps"]] == [["on_nodes", "committed"]] * 2
    shared = tmp_path / "shared"
    for step in (1, 2):
        assert data_of(tmp_path / "drive0", step) == {0, 1}
        assert data_of(tmp_path / "drive1", step) == {2, 3}
        assert data_of(shared, step) == {0, 1, 2, 3}
    # A drive alone is no checkpoint for anybody.
    assert not list(tmp_path.glob("drive*/**/.metadata"))
    theirs = {"w": torch.zeros(nodes.ROWS, 64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(theirs, checkpoint_id=str(shared / "step-2"))
    assert torch.equal(theirs["w"], torch.arange(nodes.ROWS * 64.0).reshape(-1, 64) + 2)
    assert all(run(nodes.restores_elsewhere, tmp_path, world=2))


def test_ranks_that_ask_for_different_kinds_are_told(tmp_path: Path) -> None:
    run(nodes.saves_and_drains, tmp_path)
    told = "structure_mismatch: rank 1 restores a folder that it names, rank 0 a step"
    assert run(nodes.asks_for_another_kind, tmp_path) == [told] * WORLD


def test_a_job_that_was_killed_goes_on_from_the_drives(tmp_path: Path) -> None:
    run(nodes.saves_and_drains, tmp_path)
    run(nodes.saves_and_dies, tmp_path)
    assert nodes.made(0, str(tmp_path)).latest() == 3
    results = run(nodes.comes_back, tmp_path)
    assert [result["step"] for result in results] == [3] * WORLD
    assert all(result["whole"] and result["drained"] for result in results)
    assert [result["own"] for result in results] == list(range(WORLD))
    assert not any(result["told"] for result in results)
    assert [one["step"] for one in Checkpointer(tmp_path / "shared").steps()] == [1, 2, 3, 13]


def test_a_drive_that_is_gone_is_told_and_the_step_before_is_restored(tmp_path: Path) -> None:
    run(nodes.saves_and_drains, tmp_path)
    run(nodes.saves_and_dies, tmp_path)
    shutil.rmtree(tmp_path / "drive1")
    results = run(nodes.comes_back, tmp_path)
    assert [result["step"] for result in results] == [2] * WORLD
    assert all(result["whole"] and result["drained"] for result in results), results
    assert any("2 ranks (2, 3) are not here" in line for line in results[0]["told"]), results[0]
    # What is left of it stays, for a person to decide.
    assert data_of(tmp_path / "drive0", 3) == {0, 1}


def test_a_step_that_is_damaged_on_a_drive_is_told_and_the_one_before_is_restored(
    tmp_path: Path,
) -> None:
    run(nodes.saves_and_drains, tmp_path)
    run(nodes.saves_and_dies, tmp_path)
    (data,) = (tmp_path / "drive1/step-3").glob("*_3_0.distcp")
    flip(data)
    results = run(nodes.comes_back, tmp_path)
    assert [result["step"] for result in results] == [2] * WORLD
    assert all(result["whole"] for result in results), results
    assert any("step 3 is damaged on the drive" in line for line in results[0]["told"]), results[0]


def flip(file: Path) -> None:
    """Another byte in each of the file's pages: one of them is looked at by whoever reads it."""
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 2, len(data) - 4096, 4096):
        data[at] ^= 1
    file.write_bytes(data)


def test_data_come_from_the_nodes_own_drive_and_if_damaged_from_the_next_tier(
    tmp_path: Path,
) -> None:
    run(nodes.saves_and_drains, tmp_path)
    for file in (tmp_path / "shared/step-2").glob("*.distcp"):
        shutil.copy(file, tmp_path / file.name)
        flip(file)
    results = run(nodes.comes_back, tmp_path)
    assert all(result["step"] == 2 and result["whole"] for result in results), results
    assert not any(result["told"] for result in results), results
    for file in (tmp_path / "shared/step-2").glob("*.distcp"):
        shutil.copy(tmp_path / file.name, file)
    # The newest now is step 12, of the same bytes.
    for file in (tmp_path / "drive1/step-12").glob("*.distcp"):
        flip(file)
    results = run(nodes.comes_back, tmp_path)
    assert all(result["step"] == 12 and result["whole"] for result in results), results
    assert any("on their own drives is passed over" in line for line in results[0]["told"]), results


def test_records_that_are_not_in_one_place_are_found(tmp_path: Path) -> None:
    codes = harness.run(nodes.refuses, 2, str(tmp_path))
    # Rank 1 does not find what rank 0 has written.
    assert set(codes) == {"not_found"}, codes


def test_a_drive_whose_records_are_not_there_is_left_alone(tmp_path: Path) -> None:
    run(nodes.saves_and_drains, tmp_path)
    kept = sorted((tmp_path / "drive0").rglob("*.distcp"))
    (tmp_path / "shared").rename(tmp_path / "unmounted")
    (tmp_path / "shared").mkdir()
    with pytest.raises(forebay.Error) as caught:
        nodes.made(0, str(tmp_path))
    assert caught.value.code in ("not_shared", "not_found")
    assert sorted((tmp_path / "drive0").rglob("*.distcp")) == kept
    assert not list((tmp_path / "shared").iterdir())


def test_what_cannot_be(tmp_path: Path) -> None:
    near, shared = tmp_path / "near", tmp_path / "shared"
    for options, what in [
        ({"records": shared}, "no tiers"),
        ({"records": near, "tiers": [shared]}, "all nodes share"),
        ({"records": shared, "tiers": [shared], "keep_last": 2}, "keep_last"),
        ({"records": tmp_path / "no/mount", "tiers": [shared]}, "mount"),
    ]:
        with pytest.raises(forebay.Error, match=what):
            Checkpointer(near, **options)
    Checkpointer(near, records=shared, tiers=[shared]).close()
    with pytest.raises(forebay.UsageError, match="is the drive of a node"):
        Checkpointer(near)
    with pytest.raises(forebay.UsageError, match="folder of each node"):
        Checkpointer("memory:x", records=shared, tiers=[shared])
    Checkpointer(tmp_path / "whole").save(1, {"w": torch.zeros(3)}, blocking=True)
    with pytest.raises(forebay.Error) as caught:
        Checkpointer(tmp_path / "whole", records=shared, tiers=[shared])
    assert caught.value.code == "already_exists"
