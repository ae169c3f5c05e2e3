"""Restoring where a wrapper changed the names: what is said, strictly and otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay import Checkpointer


class Wrapper(nn.Module):
    """Has the names of DistributedDataParallel, which needs a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def layer(value: float) -> nn.Module:
    made = nn.Linear(2, 2)
    with torch.no_grad():
        for one in made.parameters():
            one.fill_(value)
    return made


def as_module(model: nn.Module) -> Any:
    return {"model": model, "step": 1}


def as_dict(model: nn.Module) -> Any:
    return {"model": model.state_dict(), "step": 1}


def alone(model: nn.Module) -> Any:
    return model


@pytest.mark.parametrize("state_of", [as_module, as_dict, alone])
@pytest.mark.parametrize("wrapped", ["saved", "restored"])
def test_a_wrappers_names_are_told(tmp_path: Path, state_of: Any, wrapped: str) -> None:
    saved, blank = layer(3.0), layer(0.0)
    hint = (
        r"checkpoint's names have `module\.`" if wrapped == "saved" else r"give .*`model\.module`"
    )
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(
            1, state_of(Wrapper(saved) if wrapped == "saved" else saved), blocking=True
        )
        state = state_of(blank if wrapped == "saved" else Wrapper(blank))
        with pytest.raises(forebay.StructureMismatchError, match=hint):
            checkpoints.restore(state)
        with pytest.warns(
            UserWarning, match=r"nothing of .*state.* is in step 1.*(?i:" + hint + ")"
        ):
            report = checkpoints.restore(state, strict=False)
        assert len(report.missing) == 2
        assert len([line for line in report.warnings if "nothing of" in line]) == 1
    assert all(not one.any() for one in blank.parameters())


def test_what_the_hints_say_works(tmp_path: Path) -> None:
    saved, blank = layer(3.0), layer(0.0)
    with warnings.catch_warnings(), Checkpointer(tmp_path) as checkpoints:
        warnings.simplefilter("error")
        checkpoints.save(1, {"model": Wrapper(saved)}, blocking=True)
        checkpoints.restore({"model": {"module": blank}})
        assert all((one == 3).all() for one in blank.parameters())
        checkpoints.save(2, {"model": saved}, blocking=True)
        checkpoints.restore({"model": Wrapper(layer(0.0)).module})
        # A part is no cause for a warning.
        checkpoints.restore(
            {"model": {**layer(0.0).state_dict(), "new": torch.ones(1)}}, strict=False
        )
