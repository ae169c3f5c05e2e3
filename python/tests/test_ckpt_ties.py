"""Tensors over the same memory."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import forebay
from forebay import _native
from forebay._ckpt.ties import find_ties


def _ties(**tensors: torch.Tensor) -> dict[str, str]:
    names = list(tensors)
    found = find_ties(names, [[tensor] for tensor in tensors.values()])
    return {names[one]: names[other] for one, other in found.items()}


def test_one_memory_is_one_tensor() -> None:
    weight = torch.zeros(4, 4)
    assert _ties(a=weight, b=weight, c=weight.detach(), d=weight.clone()) == {"b": "a", "c": "a"}


def test_empty_tensors_are_tied_by_their_storage() -> None:
    empty = torch.zeros(0, 3)
    assert _ties(a=empty, b=torch.zeros(0, 3), c=empty.detach()) == {"c": "a"}


@pytest.mark.parametrize(
    "other",
    [lambda w: w[2:], lambda w: w.reshape(-1), lambda w: w.view(torch.int32), lambda w: w.t()],
    ids=["part", "reshaped", "reinterpreted", "transposed"],
)
def test_other_overlaps_are_faults(other: object) -> None:
    weight = torch.zeros(4, 4)
    with pytest.raises(forebay.SharedTensorsError, match="`a` and `b`"):
        _ties(a=weight, b=other(weight))  # type: ignore[operator]


def test_neighbours_in_one_buffer_are_apart() -> None:
    buffer = torch.zeros(64)
    assert _ties(a=buffer[:32], b=buffer[32:], c=torch.zeros(3)) == {}
    columns = torch.zeros(8, 8)
    assert _ties(a=columns[:, :3], b=columns[:, 3:], c=torch.zeros(0)) == {}
    with pytest.raises(forebay.SharedTensorsError):
        _ties(a=columns[:, :4], b=columns[:, 3:])


def test_pieces_of_one_tensor_do_not_overlap_each_other() -> None:
    local = torch.zeros(6, 8)
    assert find_ties(["a"], [[local[:, :4], local[:, 4:]]]) == {}


def _restored(
    folder: Path, state: dict[str, object], step: str = "latest"
) -> tuple[list[str], list[str]]:
    """What a restore says in its report, and warns of."""
    with warnings.catch_warnings(record=True) as told, forebay.Checkpointer(folder) as checkpointer:
        warnings.simplefilter("always")
        report = checkpointer.restore(state, step=step)
    return report.warnings, [str(one.message) for one in told]


def test_tied_targets_of_different_values_are_told_by_both_names(tmp_path: Path) -> None:
    """The state that is restored into has one tensor where two were saved."""
    nan = torch.tensor([float("nan"), 1.0])
    with forebay.Checkpointer(tmp_path) as checkpointer:
        saved = {"a": torch.ones(2), "b": torch.tensor([1.0, 2.0]), "c": nan, "d": nan.clone()}
        checkpointer.save(1, saved, blocking=True)
    tied, same = torch.zeros(2), torch.zeros(2)
    lines, told = _restored(tmp_path, {"a": tied, "b": tied, "c": same, "d": same})
    assert tied.tolist() == [1, 1] and same[1] == 1
    assert len(lines) == len(told) == 1 and lines == told
    assert "`a` and `b` are one tensor in the state" in told[0]


def test_tied_targets_that_were_saved_tied_are_not_read_twice(tmp_path: Path) -> None:
    weight = torch.arange(5000.0)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": weight, "b": weight, "c": torch.ones(())}, blocking=True)
        into = torch.zeros(5000)
        report = checkpointer.restore({"a": into, "b": into, "c": torch.zeros(())})
    assert torch.equal(into, weight) and report.warnings == []
    assert report.read_bytes < 2 * weight.nbytes


def test_tied_targets_of_torch_checkpoints_and_of_own_values_are_compared(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"a": torch.ones(3, 2).t(), "b": torch.zeros(2, 3), "c": torch.ones(2, 3)}
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock", no_dist=True)
    tied = torch.full((3, 2), 7.0).t()
    into = {"a": tied, "b": tied, "c": tied}
    lines, _ = _restored(tmp_path, into, str(tmp_path / "stock"))
    assert len(lines) == 1 and "`a` and `b` are one tensor" in lines[0], lines
    with forebay.Checkpointer(tmp_path / "own") as checkpointer:
        own = {"x": torch.ones(2), "y": torch.zeros(2)}
        checkpointer.save(1, {"w": torch.ones(1)}, per_rank=own, blocking=True)
        both = torch.full((2,), 3.0)
        with pytest.warns(UserWarning, match="x` and `.*y` are one tensor"):
            checkpointer.restore({"w": torch.zeros(1)}, per_rank={"x": both, "y": both})
    assert both.tolist() == [1, 1]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_ties_are_compared_in_host_memory_whatever_the_default_device(
    tmp_path: Path, device: str
) -> None:
    one, other, own = torch.arange(6.0), torch.arange(6.0) + 1, torch.arange(3.0)
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": one, "b": other}, per_rank={"x": own}, blocking=True)
    into = torch.zeros(6)
    torch.set_default_device(device)
    try:
        lines, _ = _restored(tmp_path, {"a": into, "b": into})
        with forebay.Checkpointer(tmp_path) as checkpointer:
            left = checkpointer.per_rank(1, 0)
    finally:
        torch.set_default_device(None)
    assert any("`a` and `b` are one tensor" in line for line in lines), lines
    assert torch.equal(into, one) and torch.equal(left["x"], own)


def test_a_comparison_of_ties_keeps_the_lease(tmp_path: Path) -> None:
    from forebay._ckpt import filling
    from forebay._ckpt.ranks import Ranks

    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": torch.zeros(2, 300_000)}, blocking=True)
    beats: list[None] = []
    checkpoint = _native.Checkpoint(tmp_path, step=1)
    report = filling.RestoreReport(1, [], [])
    one = filling.Filling(
        Ranks(None), checkpoint, checkpoint.entries, report, lambda: beats.append(None), None, None
    )
    one._beaten -= 60
    piece = filling.Piece(0, ((0, 0), (2, 300_000)), torch.ones(2, 300_000))
    same = filling.Piece(0, ((0, 0), (2, 300_000)), torch.zeros(2, 300_000))
    torch.set_default_device("meta")
    try:
        assert not one.holds([piece])
        assert len(beats) == 1
        assert one.holds([same])
    finally:
        torch.set_default_device(None)


def test_ties_are_compared_by_their_checksums_where_those_say_it(tmp_path: Path) -> None:
    weight = torch.arange(500_000.0)
    near = weight.clone()
    near[-1] = 0
    state = {"a": weight, "same": weight.clone(), "near": near, "short": torch.ones(3)}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        checkpoint = _native.Checkpoint(tmp_path, step=1)
        number = {name: place for place, (name, *_) in enumerate(checkpoint.entries)}
        whole = [((0,), (500_000,))]
        sums = {name: checkpoint.same_sums(number["a"], number[name], whole) for name in state}
        assert sums == {"a": True, "same": True, "near": False, "short": None}
        for name, lines in (("same", 0), ("near", 1)):
            into = torch.zeros(500_000)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = checkpointer.restore({"a": into, name: into}, strict=False)
            assert torch.equal(into, weight)
            told = [line for line in report.warnings if "are one tensor in the state" in line]
            assert len(told) == lines, report.warnings
            # The other one was not read.
            assert weight.nbytes <= report.read_bytes < 1.5 * weight.nbytes
