"""How restored values reach their memory and their owners: bounded buffers, and no more calls than are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay import Checkpointer
from forebay._ckpt import filling


def test_memory_that_cannot_be_filled_is_filled_through_bounded_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 4096
    monkeypatch.setattr(filling, "BUFFER_BYTES", limit)
    read, buffers = filling.read_regions, []
    state = {
        **{f"small{number}": torch.randn(5, 7) for number in range(100)},
        "rows": torch.randn(3000, 3),
        "long": torch.randn(2, 5000),
        "deep": torch.randn(6, 20, 30),
        "plain": torch.randn(2000),
        "one": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
    }
    blank = {
        name: torch.zeros(tuple(reversed(value.shape))).permute(tuple(reversed(range(value.dim()))))
        for name, value in state.items()
    }
    blank["plain"] = torch.zeros(2000)
    own = {value.data_ptr() for value in blank.values()}

    def watched(checkpoint: Any, wants: Any, memory: Any, *rest: Any) -> Any:
        buffers.append(sum(one.nbytes for one in memory if one.data_ptr() not in own))
        return read(checkpoint, wants, memory, *rest)

    monkeypatch.setattr(filling, "read_regions", watched)
    told: list[tuple[int, int]] = []
    with Checkpointer(tmp_path, progress=lambda *one: told.append(one)) as checkpoints:
        checkpoints.save(1, state).wait()
        report = checkpoints.restore(blank)
    assert all(torch.equal(blank[name], value) for name, value in state.items())
    total = sum(value.nbytes for value in state.values())
    assert report.bytes == total and told[-1] == (total, total)
    assert max(buffers) <= limit and sum(buffers) == total - 8000 - 4
    # Small ones share a buffer's worth.
    assert len(buffers) < 60


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of modules whose `load_state_dict` was called."""
    called: list[str] = []
    original = nn.Module.load_state_dict

    def counted(self: nn.Module, *arguments: Any, **named: Any) -> Any:
        called.append(type(self).__name__)
        return original(self, *arguments, **named)

    monkeypatch.setattr(nn.Module, "load_state_dict", counted)
    return called


def build() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    # Tied, and one buffer that is not saved.
    module.append(module[2])
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    return module


def test_a_module_that_is_filled_in_place_is_given_nothing(
    tmp_path: Path, loads: list[str]
) -> None:
    torch.manual_seed(0)
    module, blank = build(), build()
    module(torch.randn(8, 3))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"model": module}).wait()
        checkpoints.restore({"model": blank})
        assert loads == []
        right = module.state_dict()
        assert all(torch.equal(one, right[name]) for name, one in blank.state_dict().items())
        assert blank[3] is blank[2] and int(blank[1].num_batches_tracked) == 1


def test_a_module_that_wants_to_hear_of_it_is_given_its_state(
    tmp_path: Path, loads: list[str]
) -> None:
    class Extra(nn.Linear):
        extra = 0

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    class Own(nn.Linear):
        def _load_from_state_dict(self, *arguments: Any, **named: Any) -> Any:
            heard.append("own")
            return super()._load_from_state_dict(*arguments, **named)

    class Copied(nn.Linear):
        """What it gives are copies: filling them fills nothing of its own."""

        def state_dict(self, *arguments: Any, **named: Any) -> Any:
            found = super().state_dict(*arguments, **named)
            return {name: one.clone() for name, one in found.items()}

    heard: list[str] = []
    kinds: list[type[nn.Linear]] = [Extra, Own, Copied, nn.Linear, nn.Linear]
    saved = {str(number): kind(2, 2) for number, kind in enumerate(kinds)}
    blank = {str(number): kind(2, 2) for number, kind in enumerate(kinds)}
    saved["0"].extra = 5  # type: ignore[assignment]
    blank["3"].register_load_state_dict_post_hook(lambda *_: heard.append("post"))
    outer = nn.Sequential(blank["4"])
    blank["4"].load_state_dict = lambda *_: heard.append("instance")  # type: ignore
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, saved).wait()
        checkpoints.restore(blank)
    assert sorted(loads) == ["Copied", "Extra", "Linear", "Own"]
    assert sorted(heard) == ["instance", "own", "post"]
    assert blank["0"].extra == 5 and outer[0] is blank["4"]
    assert all(torch.equal(saved[key].weight, blank[key].weight) for key in saved)
