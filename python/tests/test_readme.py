"""The README's examples of checkpoints run as they stand."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay

README = Path(__file__).resolve().parents[2] / "README.md"


def example(word: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return str(found)


class Data:
    """Batches by number."""

    def __init__(self) -> None:
        self.at = 0

    def __next__(self) -> torch.Tensor:
        self.at += 1
        return torch.full((4, 3), float(self.at))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def run(steps: int, signalled: int | None = None) -> dict[str, Any]:
    """Runs the training loop; a signal comes in a step."""
    torch.manual_seed(7)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    losses: list[float] = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        loss = (model(batch) + torch.randn(4, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if names["step"] == signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "data": Data()}
    names |= {"steps": steps, "train": train}
    exec(compile(example("checkpoints.attach("), str(README), "exec"), names)
    return {**names, "losses": losses}


def test_the_training_loop_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "straight").mkdir()
    with monkeypatch.context() as inside:
        inside.chdir(tmp_path / "straight")
        straight = run(250)
    first = run(250, signalled=140)
    assert len(first["losses"]) == 141 and forebay.Checkpointer("runs/7").latest() == 140
    second = run(250)
    assert second["start"] == 141
    assert first["losses"] + second["losses"] == straight["losses"]
    assert [one["step"] for one in forebay.Checkpointer("runs/7").steps()] == [99, 140, 199]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_storage_of_torch_is_swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        state = {"w": torch.arange(5.0), "n": 3}
        exec(compile(example("forebay.dcp"), str(README), "exec"), {"state_dict": state})
    finally:
        torch.distributed.destroy_process_group()
    assert state["w"].tolist() == [0, 1, 2, 3, 4]
    assert forebay.Checkpointer("runs/8").latest() == 200


def test_help_names_what_there_is_for_training(tmp_path: Path) -> None:
    import dataclasses
    import pydoc

    text = pydoc.render_doc(forebay, renderer=pydoc.plaintext)
    classes = text[text.index("\nCLASSES") :]
    for name in ("Checkpointer", "SaveHandle", "RestoreReport"):
        assert f"\n    class {name}(" in classes, name
    report = pydoc.render_doc(forebay.RestoreReport, renderer=pydoc.plaintext)
    for one in dataclasses.fields(forebay.RestoreReport):
        assert f"\n |      {one.name}: " in report, one.name
    result = forebay.SaveHandle.result.__doc__ or ""
    with forebay.Checkpointer(tmp_path) as checkpoints:
        told = checkpoints.save(1, {"w": torch.ones(2)}).result()
    for key in told:
        assert f"`{key}`" in result, key
