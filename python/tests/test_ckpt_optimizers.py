"""Optimizers come back wherever they stand in the state, before their first step, and by whatever names they were saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import forebay
from forebay import Checkpointer


def build(seed: int, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    # In another order than the module has them.
    groups = [{"params": module[2].parameters()}, {"params": module[0].parameters(), "lr": 0.5}]
    return module, kind(groups, lr=0.1)


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module, optimizer = build(seed)
    for _ in range(2):
        module(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return module, optimizer


def same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left["param_groups"] == right["param_groups"] and all(
        torch.equal(left["state"][key][name], right["state"][key][name])
        for key in left["state"]
        for name in left["state"][key]
    )


def test_fresh_ones_are_restored_at_any_depth(tmp_path: Path) -> None:
    module, optimizer = trained(0)
    other_module, other = trained(1)
    with Checkpointer(tmp_path) as checkpoints:
        state = {
            "train": {"model": module, "optim": optimizer},
            "optims": [other, {"again": optimizer}],
            "other": other_module,
        }
        checkpoints.save(1, state).wait()
        (blank, fresh), (second, another) = build(2), build(3)
        _, third = build(4)
        state = {
            "train": {"model": blank, "optim": fresh},
            "optims": [another, {"again": third}],
            "other": second,
        }
        report = checkpoints.restore(state)
    assert report.missing == report.unexpected == []
    assert same(fresh, optimizer) and same(another, other) and same(third, optimizer)


@pytest.mark.parametrize("fresh", [True, False])
def test_states_that_name_parameters_are_restored_beside_the_model(
    tmp_path: Path, fresh: bool
) -> None:
    module, optimizer = trained(0)
    model_state, optim_state = get_state_dict(module, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"model": model_state, "optim": optim_state}, checkpoint_id=str(tmp_path / "step-1")
        )
    blank, other = build(1) if fresh else trained(1)
    with Checkpointer(tmp_path) as checkpoints:
        report = checkpoints.restore({"run": 0, "model": blank, "optim": other}, strict=False)
        assert report.missing == ["run"] and report.unexpected == [] and report.warnings == []
        assert same(other, optimizer)
        assert all(
            torch.equal(one, two)
            for one, two in zip(module.parameters(), blank.parameters(), strict=True)
        )
        # Groups of other parameters are no place for these settings.
        wrong = torch.optim.AdamW(
            [{"params": blank[0].parameters()}, {"params": blank[2].parameters()}]
        )
        with pytest.raises(forebay.StructureMismatchError, match="other parameters"):
            checkpoints.restore({"model": blank, "optim": wrong})


def test_one_that_gets_nothing_is_told_even_when_not_strict(tmp_path: Path) -> None:
    module, optimizer = trained(0)
    model_state, optim_state = get_state_dict(module, optimizer)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": model_state, "optim": optim_state}).wait()
        _, fresh = build(1)
        with pytest.raises(forebay.StructureMismatchError, match="get_state_dict"):
            checkpoints.restore({"optim": fresh})
        with pytest.warns(UserWarning, match=r"optimizer `optim` is restored.*get_state_dict"):
            report = checkpoints.restore({"optim": fresh}, strict=False)
        assert len(report.warnings) == 1 and not fresh.state
        # One that is built otherwise and takes a part of it is a matter of names.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoints.restore({"model": module}, strict=False)
