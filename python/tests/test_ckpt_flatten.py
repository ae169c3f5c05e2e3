"""Names and paths of nested state: torch's own, and recognising a state again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

import forebay
from forebay._ckpt.flatten import flatten, gather

_tensor = st.builds(lambda n: torch.zeros(n), st.integers(0, 3))
_plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.tuples(st.integers(), _tensor)
)
_keys = st.one_of(st.text("abc.", min_size=1, max_size=3), st.integers(0, 20))
_states = st.recursive(
    st.one_of(_tensor, _plain),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(_keys, inner, max_size=4)),
    max_leaves=25,
)


@given(st.dictionaries(_keys, _states, max_size=5))
@settings(max_examples=100, deadline=None)
def test_names_and_paths_are_those_of_torch(state: dict[Any, Any]) -> None:
    try:
        expected, paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(forebay.UsageError, match="both called"):
            flatten(state)
        return
    flat = flatten(state)
    assert flat.names == list(expected)
    assert dict(zip(flat.names, flat.paths, strict=True)) == paths
    assert all(one is expected[name] for name, one in zip(flat.names, flat.values, strict=True))
    assert flat.shape is not None
    again = gather(flat.shape, state, {})
    assert again is not None
    assert len(again) == len(flat.values)
    assert all(one is other for one, other in zip(again, flat.values, strict=True))


@given(st.dictionaries(_keys, _states, max_size=4), st.dictionaries(_keys, _states, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_state_built_otherwise_is_not_taken_for_the_same(
    one: dict[Any, Any], other: dict[Any, Any]
) -> None:
    try:
        first, second = flatten(one), flatten(other)
    except forebay.UsageError:
        return
    assert first.shape is not None
    if gather(first.shape, other, {}) is not None:
        # Keys in another form (1 and "1") give the same names.
        assert first.names == second.names or _leaves_changed(first.values, second.values)


def _leaves_changed(one: list[Any], other: list[Any]) -> bool:
    """Whether a value became a container or the other way round, which callers see by its type."""
    return len(one) != len(other) or any(
        type(a) is not type(b) for a, b in zip(one, other, strict=True)
    )


def test_objects_with_a_state_are_replaced_by_it_wherever_they_stand() -> None:
    module = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    flat = flatten({"app": {"model": module}, "list": [1, optimizer], "n": 1})
    assert "app.model.weight" in flat.names
    assert "list.1.param_groups.0.lr" in flat.names and "list.0" in flat.names
    assert [path for _, path, _ in flat.owners] == [("app", "model"), ("list", 1)]
    assert flatten(module).names == ["weight", "bias"]


def test_mappings_that_hold_nothing_are_told() -> None:
    flat = flatten({"a": {}, "b": {"c": {"d": {}}}, "e": [], "f": None})
    assert flat.names == ["e", "f"]
    assert flat.empty == ["a", "b.c.d"]


def test_a_cycle_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(forebay.UsageError, match="deeper"):
        flatten(state)


def test_what_is_no_dict_is_refused() -> None:
    with pytest.raises(forebay.UsageError, match="a dict is needed"):
        flatten([1, 2])
