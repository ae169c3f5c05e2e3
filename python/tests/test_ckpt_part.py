"""Checkpointer on ranks that part ways: nobody hangs, everybody hears why, and the next save works."""

from __future__ import annotations

from pathlib import Path

from ckpt_cases import faults, harness

from forebay import Checkpointer


def committed(path: Path) -> list[int]:
    steps = Checkpointer(path).steps()
    return [one["step"] for one in steps if one["state"] == "committed"]


def test_another_mesh_of_the_same_ranks_is_another_structure(tmp_path: Path) -> None:
    harness.run(faults.other_meshes, 4, str(tmp_path))


def test_arguments_that_one_rank_has_wrong_break_that_save_alone(tmp_path: Path) -> None:
    first, second = harness.run(faults.bad_arguments, 2, str(tmp_path))
    for heard in (first, second):
        assert [code for code, _, _ in heard][2::2] == ["ok", "ok", "ok"]
        for code, text, took in heard[:2]:
            assert code == "usage" and "rank 0" in text and took < 20, text
    assert "cannot be called" in first[3][1] and "None" in first[5][1]
    for code, text, took in (second[3], second[5]):
        assert code == "structure_mismatch" and "rank 0" in text and took < 20
    assert "cannot be called" in second[0][1] and "1.5" in second[1][1]
    assert committed(tmp_path) == [3, 5, 7]


def test_a_structure_that_changes_on_one_rank_is_saved_by_the_next_save(tmp_path: Path) -> None:
    for heard in harness.run(faults.one_rank_changes, 2, str(tmp_path)):
        codes = [code for code, _, _ in heard]
        assert codes == ["ok", "structure_mismatch", "ok", "ok", "structure_mismatch", "ok", "ok"]
        assert all(took < 20 for _, _, took in heard), heard
    assert committed(tmp_path) == [1, 3, 4, 6, 7]


def test_what_keeps_a_rank_from_a_new_structure_is_what_all_hear(tmp_path: Path) -> None:
    for heard in harness.run(faults.all_change_and_one_cannot, 2, str(tmp_path)):
        assert [code for code, _, _ in heard] == ["ok", "unsupported", "ok", "ok"]
        assert "rank 1" in heard[1][1] or "sparse" in heard[1][1]
        assert "sparse" in heard[1][1] and heard[1][2] < 20
    assert committed(tmp_path) == [1, 3, 4]


def test_ranks_that_know_different_parents_save_together_after_a_restore(tmp_path: Path) -> None:
    for heard in harness.run(faults.parents_that_differ, 2, str(tmp_path)):
        assert [code for code, _, _ in heard] == ["ok", "ok", "ok"]
    assert committed(tmp_path) == [1, 2, 3]


def test_a_rank_that_withdraws_takes_no_memory_and_raises_its_own_error(tmp_path: Path) -> None:
    first, second = harness.run(faults.withdraws_without_memory, 2, str(tmp_path))
    assert first[0][0] == "structure_mismatch" and "rank 1" in first[0][1]
    assert second[0][0] == "unsupported" and second[1] == 0
    assert first[2][0] == second[2][0] == "ok"
    assert second[3][0] == "unsupported"


def test_a_group_beside_another_is_made_once(tmp_path: Path) -> None:
    assert harness.run(faults.groups_made, 2, str(tmp_path)) == [1, 1]


def test_folders_that_are_not_shared_are_found_even_if_they_are_alike(tmp_path: Path) -> None:
    for code, text, took in harness.run(faults.folders_of_their_own, 2, str(tmp_path)):
        assert code == "not_found" and "rank 1" in text and "not shared" in text and took < 20
