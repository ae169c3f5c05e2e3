"""What a restore reads, and what it says where that is damaged or no folder of steps."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import forebay
from forebay import Checkpointer
from forebay.dcp import Writer


def flip(folder: Path, value: float) -> None:
    """Changes a bit of a tensor of one value."""
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.find(torch.full((50,), value).numpy().tobytes()) + 8] ^= 1
    file.write_bytes(data)


def test_a_damaged_step_names_the_one_before_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"w": torch.full((1000,), float(step))}).wait()
        flip(tmp_path / "step-30", 30.0)
        blank = {"w": torch.zeros(1000)}
        with pytest.raises(forebay.ChecksumError, match='`w`|"w"') as caught:
            checkpoints.restore(blank)
        assert "step 20 is the newest before it: restore(state, step=20)" in str(caught.value)
        assert checkpoints.restore(blank, step=20).step == 20
        flip(tmp_path / "step-10", 10.0)
        with pytest.raises(forebay.ChecksumError) as caught:
            checkpoints.restore(blank, step=10)
        assert "no step before it is committed" in str(caught.value)


def test_a_commit_that_cannot_be_read_names_the_one_before_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.ones(10)}).wait()
        metadata = tmp_path / "step-2" / ".metadata"
        metadata.write_bytes(metadata.read_bytes()[:-20])
        with pytest.raises(forebay.DataError) as caught:
            checkpoints.restore({"w": torch.zeros(10)})
        assert "restore(state, step=1)" in str(caught.value)
        assert checkpoints.restore({"w": torch.zeros(10)}, 1).step == 1


@pytest.mark.parametrize("ours", [True, False])
def test_a_folder_that_is_a_checkpoint_is_restored(tmp_path: Path, ours: bool) -> None:
    folder = tmp_path / "final"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(
            {"w": torch.arange(5.0), "n": 3},
            **({"storage_writer": Writer(folder)} if ours else {"checkpoint_id": str(folder)}),
        )
    blank = {"w": torch.zeros(5), "n": 0}
    with Checkpointer(folder) as checkpoints:
        with pytest.raises(forebay.NotFoundError, match="is a checkpoint itself") as caught:
            checkpoints.restore(blank)
        assert f"restore(state, step={str(folder)!r})" in str(caught.value)
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, blank).wait()
        for form in (folder, str(folder)):
            blank = {"w": torch.zeros(5), "n": 0}
            report = checkpoints.restore(blank, step=form)
            assert blank["w"].tolist() == [0, 1, 2, 3, 4] and blank["n"] == 3
            assert report.step is None and report.origin == ("forebay" if ours else "dcp")
        # It is nobody's parent: saves go on in their own line.
        checkpoints.save(2, blank).wait()
        assert checkpoints.latest() == 2
        with pytest.raises(forebay.UsageError, match="no folder that is there"):
            checkpoints.restore(blank, step=tmp_path / "nothing")
        with pytest.raises(forebay.UsageError):
            checkpoints.restore(blank, step="100")


def test_a_step_folder_says_whose_step_it_is(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(7, {"w": torch.ones(3)}).wait()
    blank = {"w": torch.zeros(3)}
    with Checkpointer(tmp_path / "step-7") as checkpoints:
        with pytest.raises(forebay.NotFoundError) as caught:
            checkpoints.restore(blank)
        assert f"Checkpointer({str(tmp_path)!r}).restore(state, step=7)" in str(caught.value)
    with Checkpointer(tmp_path / "other") as checkpoints:
        assert checkpoints.restore(blank, step=tmp_path / "step-7").step == 7
    assert blank["w"].tolist() == [1, 1, 1]
