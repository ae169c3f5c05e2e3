"""Checkpointer on one process: what comes back, and what is said where it cannot."""

from __future__ import annotations

import os
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import forebay
from forebay import Checkpointer


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    torch.manual_seed(1)
    state = {
        "model": {"weight": torch.randn(4, 6), "bias": torch.randn(4)},
        "optim": {"state": {0: {"exp_avg": torch.randn(4, 6), "step": torch.tensor(3.0)}}},
        "epoch": 7,
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, blocking=True)
    return tmp_path, state


def blank_model() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(4, 6), "bias": torch.zeros(4)}


def test_names_on_one_side_only_are_errors_or_reported(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    with Checkpointer(path) as checkpoints:
        more = {"model": {**blank_model(), "extra": torch.ones(2)}, "lr": 0.5}
        with pytest.raises(
            forebay.StructureMismatchError, match=r"lacks `lr`, `model.extra`|lacks"
        ):
            checkpoints.restore(more)
        assert more["model"]["weight"].abs().sum() == 0, "nothing is read before all is compared"
        report = checkpoints.restore(more, strict=False)
        assert sorted(report.missing) == ["lr", "model.extra"]
        assert torch.equal(more["model"]["weight"], state["model"]["weight"])
        assert more["model"]["extra"].tolist() == [1, 1] and more["lr"] == 0.5
        fewer = {"model": {"weight": torch.zeros(4, 6)}}
        with pytest.raises(forebay.StructureMismatchError, match=r"no place for `model\.bias`"):
            checkpoints.restore(fewer)
        report = checkpoints.restore(fewer, strict=False)
        assert "model.bias" in report.unexpected and "epoch" in report.unexpected
        # What was not asked for at all is no fault, and still told.
        report = checkpoints.restore({"model": blank_model()})
        assert sorted(report.unexpected) == ["epoch", "optim.state.0.exp_avg", "optim.state.0.step"]


def test_a_mismatch_names_the_key_and_both_sides_before_anything_is_read(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    path, _ = saved
    with Checkpointer(path) as checkpoints:
        state = {"model": {"weight": torch.zeros(6, 4), "bias": torch.zeros(4).half()}, "epoch": 1}
        with pytest.raises(forebay.StructureMismatchError) as caught:
            checkpoints.restore(state)
        text = str(caught.value)
        assert "`model.weight` is [6, 4] of float32 in the state, [4, 6] of float32" in text
        assert "`model.bias` is [4] of float16 in the state, [4] of float32" in text
        assert str(path) in text and "step 1" in text
        with pytest.raises(forebay.StructureMismatchError, match="an object in the checkpoint"):
            checkpoints.restore({"epoch": torch.zeros(1)})
        with pytest.raises(forebay.StructureMismatchError, match="a tensor in the checkpoint"):
            checkpoints.restore({"model": {"weight": 1, "bias": torch.zeros(4)}})


def test_a_step_that_is_not_there_is_an_error_that_lists_what_is(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    path, _ = saved
    with Checkpointer(path) as checkpoints:
        with pytest.raises(forebay.NotFoundError, match="committed steps: 1"):
            checkpoints.restore({"model": blank_model()}, 2)
        (path / "step-3").mkdir()
        (path / "step-3" / "__0_0.distcp").write_bytes(b"begun")
        with pytest.raises(forebay.Error) as caught:
            checkpoints.restore({"model": blank_model()}, 3)
        assert caught.value.code in ("not_committed", "not_found")
        # What was begun and never committed is not the latest.
        assert checkpoints.latest() == 1
        assert checkpoints.restore({"model": blank_model()}).step == 1
    with Checkpointer(tmp_path / "new") as checkpoints:
        assert checkpoints.latest() is None and checkpoints.steps() == []
        with pytest.raises(forebay.NotFoundError, match="no step is committed"):
            checkpoints.restore({"model": blank_model()})


def test_a_restore_beside_a_save_reads_the_commit_before(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, staging_bytes="1MiB") as checkpoints:
        state = {"w": torch.ones(4 << 20)}
        checkpoints.save(1, state).wait()
        handle = checkpoints.save(2, {"w": torch.full((4 << 20,), 2.0)}, overlap=True)
        blank = {"w": torch.zeros(4 << 20)}
        report = checkpoints.restore(blank)
        assert report.step in (1, 2) and bool((blank["w"] == report.step).all())
        handle.wait()


def test_an_optimizer_that_never_stepped_is_restored(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        module[0].bias.requires_grad_(False)
        return module, torch.optim.AdamW(
            [
                {"params": [module[0].weight, module[0].bias], "lr": 0.1},
                {"params": module[2].parameters(), "weight_decay": 0.5},
            ]
        )

    def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            module(torch.randn(4, 3, generator=generator)).square().sum().backward()
            optimizer.step()

    module, optimizer = build()
    train(module, optimizer, 3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, {"model": module, "optim": optimizer}).wait()
        other, fresh = build()
        report = checkpoints.restore({"model": other, "optim": fresh})
    assert report.missing == [] and report.unexpected == []
    for name, tensor in optimizer.state_dict()["state"].items():
        for key, value in tensor.items():
            assert torch.equal(fresh.state_dict()["state"][name][key], value)
    train(module, optimizer, 2)
    train(other, fresh, 2)
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_states_inside_of_states_are_given_back(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.offset, self.given = 0, False

        def state_dict(self) -> dict[str, Any]:
            return {"offset": self.offset, "shuffle": torch.tensor([self.offset])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.offset, self.given = state["offset"] + int(state["shuffle"]), True

    loader = Loader()
    loader.offset = 21
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"app": {"loader": loader}, "list": [loader, 1]}).wait()
        other, second = Loader(), Loader()
        checkpoints.restore({"app": {"loader": other}, "list": [second, None]})
        assert other.offset == second.offset == 42
        checkpoints.save(2, loader).wait()
        third = Loader()
        checkpoints.restore(third, 2)
        assert third.offset == 42


def test_checkpoints_of_torch_are_restored(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.randn(5, 7).t(), "n": torch.tensor(3)},
        "extra": {"names": ["a"], "when": (1, 2)},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(tmp_path / "step-12"))
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest() == 12
        blank = {
            "model": {"w": torch.zeros(7, 5), "n": torch.tensor(0)},
            "extra": {"names": None, "when": None},
        }
        report = checkpoints.restore(blank)
    assert report.origin == "dcp" and blank["extra"] == state["extra"]
    assert torch.equal(blank["model"]["w"], state["model"]["w"]) and blank["model"]["n"] == 3


def test_dicts_that_old_torch_stored_as_one_value_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _version = pytest.importorskip("torch.distributed.checkpoint._version")

    # torch 2.3 and before stored a dict without tensors as one object, and so does this torch when told.
    state = {"sched": {"last": 3, "lrs": [0.5], "deep": {"x": (1,)}}, "model": {"w": torch.ones(2)}}
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr(_version, "_derived_version", "2_3")
        dcp.save(state, checkpoint_id=str(tmp_path / "step-1"))
    with Checkpointer(tmp_path) as checkpoints:
        blank: dict[str, Any] = {
            "sched": {"last": 0, "lrs": [], "deep": {"x": None}},
            "model": {"w": torch.zeros(2)},
        }
        report = checkpoints.restore(blank)
        assert blank["sched"] == state["sched"] and report.missing == []
        with pytest.raises(forebay.StructureMismatchError, match="not in the value stored above"):
            checkpoints.restore({"sched": {"other": 0}, "model": {"w": torch.zeros(2)}})


class _Evil:
    """A pickle of it runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_objects_are_not_executed_unless_the_caller_says_so(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"model": {"w": torch.zeros(1)}, "cfg": _Evil(mark)}).wait()
        with pytest.raises(forebay.ForbiddenGlobalError, match="`cfg`") as caught:
            checkpoints.restore({"cfg": None})
        assert "weights_only=False" in str(caught.value) and not mark.exists()
        checkpoints.restore({"model": {"w": torch.zeros(1)}})
        checkpoints.restore({"cfg": None}, weights_only=False)
        assert mark.exists()


def test_metadata_is_not_executed(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    folder = tmp_path / "run" / "step-1"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil(mark), 4))
    with Checkpointer(tmp_path / "run") as checkpoints:
        with pytest.raises(forebay.Error) as caught:
            checkpoints.restore({"w": torch.zeros(1)}, 1)
    assert isinstance(caught.value, forebay.DataError) and not mark.exists()


def test_a_flipped_bit_is_found_before_anything_is_handed_over(tmp_path: Path) -> None:
    class Watch(nn.Linear):
        handed = False

        def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
            self.handed = True
            return super().load_state_dict(*arguments, **named)

    with Checkpointer(tmp_path) as checkpoints:
        module = Watch(64, 64)
        checkpoints.save(1, {"model": module}).wait()
        (file,) = (tmp_path / "step-1").glob("*.distcp")
        data = bytearray(file.read_bytes())
        at = data.find(struct.pack("<f", module.weight[3, 5].item()))
        assert at > 0
        data[at] ^= 4
        file.write_bytes(data)
        other = Watch(64, 64)
        with pytest.raises(forebay.ChecksumError):
            checkpoints.restore({"model": other})
        assert not other.handed


def test_values_of_one_rank_come_back_by_themselves(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        own = {"rng": torch.get_rng_state(), "loader": {"at": 5, "seen": [1, {"t": torch.ones(2)}]}}
        checkpoints.save(1, {"w": torch.zeros(1)}, per_rank=own).wait()
        # What belongs to a rank may change its form from save to save.
        checkpoints.save(2, {"w": torch.zeros(1)}, per_rank={"loader": {"at": 6}}).wait()
        blank: dict[str, Any] = {
            "rng": torch.zeros_like(own["rng"]),
            "loader": {"at": 0, "seen": [0, {"t": torch.zeros(2)}]},
        }
        report = checkpoints.restore({"w": torch.zeros(1)}, 1, per_rank=blank)
        assert report.per_rank_saved_by == {
            0: ("loader.at", "loader.seen.0", "loader.seen.1.t", "rng")
        }
        assert torch.equal(blank["rng"], own["rng"]) and blank["loader"]["at"] == 5
        assert blank["loader"]["seen"][1]["t"].tolist() == [1, 1]
        read = checkpoints.per_rank(1)
        assert torch.equal(read["rng"], own["rng"]) and read["loader"]["seen"][0] == 1
        assert checkpoints.per_rank(2) == {"loader": {"at": 6}}
        assert checkpoints.per_rank(2, rank=3) == {}
        report = checkpoints.restore({"w": torch.zeros(1)}, 2, per_rank={"rng": None}, strict=False)
        assert report.missing == ["per_rank/0/rng"]
        assert report.unexpected == ["per_rank/0/loader.at"] and report.per_rank_restored == []


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    state = {"w": torch.ones(1 << 20), "small": torch.ones(3)}
    with Checkpointer(tmp_path, progress=lambda done, total: told.append((done, total))) as found:
        found.save(1, state).wait()
        found.restore(state)
    total = (4 << 20) + 12
    assert told[-1] == (total, total) and all(done <= of == total for done, of in told)


def test_only_the_rows_that_are_wanted_are_read(tmp_path: Path) -> None:
    class Part(torch.Tensor):
        """A few rows of a tensor, by the checkpointable-tensor protocol."""

    with Checkpointer(tmp_path) as checkpoints:
        whole = torch.arange(4096.0 * 1024).reshape(4096, 1024)
        checkpoints.save(1, {"w": whole}).wait()
        rows = torch.zeros(512, 1024)
        rows.global_shape, rows.local_sizes = (4096, 1024), ((512, 1024),)  # type: ignore[attr-defined]
        rows.global_offsets, rows.local_offsets = ((1000, 0),), ((0, 0),)  # type: ignore[attr-defined]
        report = checkpoints.restore({"w": rows})
    assert torch.equal(rows, whole[1000:1512])
    read = sum(one["read_bytes"] for one in report.transfers)
    assert report.bytes == rows.nbytes
    # Whole checksum blocks of 1 MiB are read: two more at the most.
    assert read <= rows.nbytes + (2 << 20)


def test_going_back_makes_a_new_line_of_steps(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4)}
    with Checkpointer(tmp_path, keep_last=2) as checkpoints:
        for step in (10, 20, 30):
            state["w"].fill_(step)
            checkpoints.save(step, state).wait()
        checkpoints.restore(state)
        assert state["w"].tolist() == [30] * 4
        checkpoints.restore(state, 10)
        state["w"].fill_(11)
        checkpoints.save(11, state).wait()
        # What was saved on the way that was left is not newer.
        assert checkpoints.latest() == 11
        assert checkpoints.restore(state).step == 11 and state["w"].tolist() == [11] * 4
    assert Checkpointer(tmp_path).latest() == 11
