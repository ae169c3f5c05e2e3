"""What a rank saved as its own comes back, in whatever form it is asked for; and what does not is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay import Checkpointer


def own() -> dict[str, Any]:
    return {
        "rng": torch.arange(8, dtype=torch.uint8),
        "loader": {"at": 5, "seen": [1, {"t": torch.ones(2)}]},
        "note": "x",
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, per_rank=own()).wait()
    return tmp_path


def restore(path: Path, per_rank: Any, **more: Any) -> forebay.RestoreReport:
    with Checkpointer(path) as checkpoints:
        return checkpoints.restore({"w": torch.zeros(2)}, per_rank=per_rank, **more)


def check(found: dict[str, Any]) -> None:
    wanted = own()
    assert found.keys() == wanted.keys()
    assert torch.equal(found["rng"], wanted["rng"]) and found["note"] == "x"
    assert found["loader"]["at"] == 5 and found["loader"]["seen"][0] == 1
    assert found["loader"]["seen"][1]["t"].tolist() == [1, 1]


def test_an_empty_dict_is_filled_with_all(saved: Path) -> None:
    found: dict[str, Any] = {}
    report = restore(saved, found)
    check(found)
    assert report.missing == report.unexpected == report.warnings == []
    assert report.per_rank_restored == [
        "loader.at",
        "loader.seen.0",
        "loader.seen.1.t",
        "note",
        "rng",
    ]


def test_values_of_other_kinds_give_way_to_what_was_saved(saved: Path) -> None:
    blank: dict[str, Any] = {"rng": None, "loader": None, "note": torch.zeros(3)}
    report = restore(saved, blank)
    check(blank)
    assert report.missing == report.unexpected == []
    # An empty dict inside is filled, and keeps its identity.
    loader: dict[str, Any] = {}
    blank = {"rng": torch.zeros(8, dtype=torch.uint8), "loader": loader, "note": ""}
    restore(saved, blank)
    check(blank)
    assert blank["loader"] is loader


def test_tensors_are_filled_where_they_are(saved: Path) -> None:
    rng = torch.zeros(8, dtype=torch.uint8)
    blank = {**own(), "rng": rng}
    restore(saved, blank)
    assert blank["rng"] is rng and rng.tolist() == list(range(8))


def test_what_has_no_place_is_an_error_or_reported(saved: Path) -> None:
    blank: dict[str, Any] = {"rng": None}
    with pytest.raises(
        forebay.StructureMismatchError, match=r"no place for .*loader\.at"
    ) as caught:
        restore(saved, blank)
    assert "per_rank={}" in str(caught.value) and blank == {"rng": None}
    report = restore(saved, blank, strict=False)
    assert blank["rng"].tolist() == list(range(8))
    assert "per_rank/0/note" in report.unexpected and report.per_rank_restored == ["rng"]
    more = {**own(), "extra": 1}
    with pytest.raises(forebay.StructureMismatchError, match="lacks `per_rank/0/extra`"):
        restore(saved, more)
    assert restore(saved, more, strict=False).missing == ["per_rank/0/extra"]
    wrong = {**own(), "rng": torch.zeros(3)}
    with pytest.raises(forebay.StructureMismatchError, match="`per_rank/0/rng` is"):
        restore(saved, wrong)
    with pytest.raises(forebay.UsageError, match="a dict is needed"):
        restore(saved, [1])


def test_not_asking_is_told(saved: Path) -> None:
    with pytest.warns(UserWarning, match=r"None were restored, .*per_rank=\{\}"):
        report = restore(saved, None)
    assert report.per_rank_left == [0] and report.per_rank_restored == []


def test_asking_where_nobody_saved_any_is_told(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}).wait()
    found: dict[str, Any] = {}
    with pytest.warns(UserWarning, match="no rank saved values of its own"):
        report = restore(tmp_path, found)
    assert found == {} and report.per_rank_saved_by == {}


def test_objects_get_their_state_back(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.at = 0
            self.given: Any = None

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at} if self.at else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.given = state

    loader = Loader()
    loader.at = 7
    module = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2)}, per_rank={"l": loader, "o": optimizer}).wait()
    # One whose state is empty before it was used, and an optimizer that has not stepped.
    fresh, other = Loader(), torch.optim.Adam(nn.Linear(2, 2).parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(tmp_path, {"l": fresh, "o": other})
    assert fresh.given == {"at": 7}
    states = zip(optimizer.state.values(), other.state.values(), strict=True)
    assert all(torch.equal(one["exp_avg"], two["exp_avg"]) for one, two in states)
