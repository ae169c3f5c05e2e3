"""Checkpointer on several ranks: gloo between processes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ckpt_cases import harness, jobs, meshes

from forebay import Checkpointer


def committed(path: Path) -> list[int]:
    steps = Checkpointer(path).steps()
    return [one["step"] for one in steps if one["state"] == "committed"]


def test_no_collective_call_from_the_second_save_on_and_none_off_the_main_thread(
    tmp_path: Path,
) -> None:
    for first, *rest in harness.run(jobs.saves_without_collectives, 4, str(tmp_path)):
        assert first and all(call.startswith("MainThread:") for call in first)
        assert rest == [[], [], [], []]


@pytest.mark.parametrize("layout", ["rows", "columns", "both", "hybrid", "twice", "all"])
def test_four_ranks_to_others_and_back(tmp_path: Path, layout: str) -> None:
    harness.run(meshes.save, 4, str(tmp_path), layout)
    for world, other in ((4, layout), (3, "rows"), (2, "columns"), (1, "rows")):
        results = harness.run(meshes.restore, world, str(tmp_path), other)
        wanted = sum(want for want, _ in results)
        assert wanted >= sum(torch.Size(one).numel() for one in meshes.SHAPES.values()) * 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_few_ranks_to_more(tmp_path: Path, world: int) -> None:
    harness.run(meshes.save, world, str(tmp_path), "rows")
    harness.run(meshes.restore, 4, str(tmp_path), "both")


def test_what_all_ranks_hold_is_written_once_and_balanced(tmp_path: Path) -> None:
    results = harness.run(jobs.replicas_are_written_once, 4, str(tmp_path))
    written = [wrote for wrote, _ in results]
    total = 16 * 300 * 300 * 4 + 40 * 8 * 4 + 256 * 256 * 4
    assert sum(written) == total
    assert max(written) < 1.1 * total / 4


def test_values_that_should_be_alike_and_differ_are_one_warning(tmp_path: Path) -> None:
    texts = harness.run(jobs.values_that_differ, 4, str(tmp_path))
    (line,) = texts[0]
    assert "`rng` (ranks 0, 1, 2, 3)" in line and "`counter` (ranks 0, 1, 3)" in line
    assert "per_rank" in line and "`same`" not in line and "model" not in line
    assert texts[1:] == [[], [], []]


def test_what_belongs_to_a_rank_comes_back_to_it(tmp_path: Path) -> None:
    harness.run(jobs.own_values, 4, str(tmp_path), False)
    for rank, told in enumerate(harness.run(jobs.own_values, 4, str(tmp_path), True)):
        assert told["at"] == 100 + rank and told["rng"] == [rank] * 4
        assert told["saved_by"] == [0, 1, 2, 3] and told["left"] == [] and told["warnings"] == []


def test_on_fewer_ranks_nothing_that_belongs_to_a_rank_is_dropped_in_silence(
    tmp_path: Path,
) -> None:
    harness.run(jobs.own_values, 4, str(tmp_path), False)
    for rank, told in enumerate(harness.run(jobs.own_values, 2, str(tmp_path), True)):
        assert told["at"] == 100 + rank
        assert told["saved_by"] == [0, 1, 2, 3] and told["left"] == [2, 3]
        assert told["others"] == [100, 101, 102, 103]
        assert len(told["warnings"]) == (rank == 0)
        assert all("ranks 2, 3" in line for line in told["warnings"])


def test_on_more_ranks_those_without_values_are_told(tmp_path: Path) -> None:
    harness.run(jobs.own_values, 2, str(tmp_path), False)
    results = harness.run(jobs.own_values, 3, str(tmp_path), True)
    assert [told["at"] for told in results] == [100, 101, -1]
    assert sorted(results[2]["missing"]) == ["per_rank/2/loader.at", "per_rank/2/rng"]
    assert "ranks 0, 1; this job has 3. Ranks 2 got none" in results[0]["warnings"][0]
    assert results[1]["warnings"] == []
    (line,) = results[2]["warnings"]
    assert line.startswith("rank 2 got no values of its own: only ranks 0, 1 saved some")


def test_a_rank_whose_state_alone_changed_gets_an_error_not_a_hang(tmp_path: Path) -> None:
    first, second, third = harness.run(jobs.one_rank_builds_otherwise, 3, str(tmp_path))
    assert second[0] == "structure_mismatch" and "1 of 3 ranks" in second[1] and second[2] < 20
    # The others do not wait for it.
    for code, text, took in (first, third):
        assert code == "structure_mismatch" and "rank 1" in text and took < 20, text
    assert committed(tmp_path) == [1]


def test_structures_that_were_agreed_on_are_known_again(tmp_path: Path) -> None:
    for told in harness.run(jobs.structures_that_ranks_know, 2, str(tmp_path)):
        assert told == ["talked", "talked", "silent", "silent", "silent", "silent"]


def test_the_first_save_needs_no_luck_in_timing(tmp_path: Path) -> None:
    assert harness.run(jobs.first_save_at_different_times, 4, str(tmp_path)) == [True] * 4
    blank = {"a": torch.zeros(4), "b": torch.zeros(8, 3), "c": 0}
    Checkpointer(tmp_path).restore(blank)
    assert blank["b"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]  # type: ignore[index]


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("first", "unsupported", "sparse"),
        ("disk", "no_space", "files of this process may have 4096"),
        ("plan", "structure_mismatch", "`epoch` is a tensor in the state"),
        ("read", "io", "the disk of this node is gone"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_with_its_error(
    tmp_path: Path, how: str, code: str, text: str
) -> None:
    results = harness.run(jobs.failing_rank, 4, str(tmp_path), how)
    for heard, said, took in results:
        assert heard == code and text in said and "rank 1" in said, said
        assert took < 20
    assert committed(tmp_path) == ([] if how == "first" else [1, 3])


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    for said in harness.run(jobs.different_steps, 2, str(tmp_path)):
        assert "rank 0 saves step 0, rank 1 step 1" in said


def test_a_directory_that_is_not_shared_is_found_at_the_first_save(tmp_path: Path) -> None:
    for said in harness.run(jobs.storage_that_is_not_shared, 2, str(tmp_path)):
        assert "rank 1" in said and "not shared" in said


def test_all_ranks_restore_the_step_that_rank_0_saw(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((4,), float(step))}).wait()
    assert harness.run(jobs.restore_latest_while_it_moves, 2, str(tmp_path)) == [2, 2]


def test_a_save_is_skipped_by_all_ranks_or_by_none(tmp_path: Path) -> None:
    first, *others = harness.run(jobs.skipping, 3, str(tmp_path))
    assert others == [first, first] and first[0] == 0
    assert committed(tmp_path) == first


def test_a_signal_on_one_rank_ends_all_ranks_at_one_step(tmp_path: Path) -> None:
    results = harness.run(jobs.signalled, 4, str(tmp_path))
    (step,) = {stopped for stopped, _ in results}
    assert 5 < step < 12 and all(saved for _, saved in results)
    assert committed(tmp_path) == [step]


def test_a_group_of_some_ranks_saves_by_itself(tmp_path: Path) -> None:
    outside, one, other, three = harness.run(jobs.subgroup, 4, str(tmp_path))
    assert one == three == [1, 1, 3, 3]
    assert "not in the process group" in outside and "not in the process group" in other


def test_training_with_fsdp_and_tied_weights_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = harness.run(jobs.fsdp_with_tied_weights, 4, str(tmp_path), False)
    again = harness.run(jobs.fsdp_with_tied_weights, 4, str(tmp_path), True)
    assert [losses[-1:] for losses in first] == again
    fewer = harness.run(jobs.fsdp_with_tied_weights, 2, str(tmp_path), True)
    assert fewer[0][0] == pytest.approx(first[0][-1], rel=1e-5)


def test_rows_cut_by_fsdp_after_tensor_parallelism_are_stored_where_they_belong(
    tmp_path: Path,
) -> None:
    written = harness.run(jobs.fsdp_over_tp, 4, str(tmp_path), False)
    assert sum(written) == 7 * 3 * 4
    harness.run(jobs.fsdp_over_tp, 1, str(tmp_path), True)


def test_ragged_shards_with_padding_are_stored_without_it(tmp_path: Path) -> None:
    assert harness.run(jobs.ragged, 4, str(tmp_path / "sound"), False) == [""] * 4
    assert harness.run(jobs.ragged, 4, str(tmp_path / "hole"), True) == ["hole"] * 4
    assert committed(tmp_path / "hole") == []


def test_shapes_that_ranks_disagree_on_are_named(tmp_path: Path) -> None:
    for said in harness.run(jobs.disagreeing_shapes, 2, str(tmp_path)):
        assert (
            "`w` is a tensor [2] of float32 on rank 0 and a tensor [3] of float32 on rank 1" in said
        )


def test_stages_of_a_pipeline_hold_different_layers(tmp_path: Path) -> None:
    results = harness.run(jobs.pipeline, 4, str(tmp_path))
    assert sum(wrote for wrote, _ in results) == (2 * 12 + 5) * 4


def test_a_checkpointer_may_be_older_than_the_process_group(tmp_path: Path) -> None:
    master = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    case, port = jobs.made_before_the_group, master.port
    assert harness.run(case, 2, port, 2, str(tmp_path), store=False) == [2, 2]
