"""Tensors over the same memory."""

from __future__ import annotations

import pytest
import torch

import forebay
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
