"""What a manifest says of a state whose tensors are cut over ranks: how they are cut once, and nothing of it a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_cases import harness, manifests

import forebay
from forebay import _native

#: Of a tensor: a row of the table; of what a rank writes of it: place, length and a checksum.
ROW_BYTES, CHUNK_BYTES = 24, 14

#: Header, info, index, and what parts take without chunks, of four ranks.
BESIDE_BYTES = 2200


def manifest(step: Path) -> Path:
    """The one manifest of a step."""
    (found,) = step.glob("forebay.manifest-*")
    return found


@pytest.mark.parametrize("layout", manifests.LAYOUTS)
def test_regions_and_names_are_not_in_the_parts(tmp_path: Path, layout: str) -> None:
    harness.run(manifests.save_and_restore, 4, str(tmp_path), layout)
    step = tmp_path / "step-1"
    chunks = (2 if layout == "hybrid" else 4) * manifests.TENSORS
    size = manifest(step).stat().st_size
    # Which replica holds a shard is a list of two with a checksum.
    lists = 8 * manifests.TENSORS if layout == "hybrid" else 0
    most = ROW_BYTES * manifests.TENSORS + CHUNK_BYTES * chunks + lists + BESIDE_BYTES
    assert size < most, f"{size} bytes for {manifests.TENSORS} tensors, {most} at the most"
    checkpoint = _native.Checkpoint(tmp_path, step=1)
    for number in range(manifests.TENSORS):
        regions = checkpoint.chunks(f"model.layers.{number}.weight")
        rows = 9 + number % 4
        assert sum(sizes[0] * sizes[1] for _, sizes in regions) == rows * 6
    # Stock readers, and one rank that has no mesh.
    whole = {
        f"layers.{number}.weight": torch.zeros(9 + number % 4, 6)
        for number in range(manifests.TENSORS)
    }
    with forebay.Checkpointer(tmp_path) as checkpoints:
        checkpoints.restore({"model": whole}, 1)
    stock = {"model": {name: torch.zeros_like(one) for name, one in whole.items()}}
    dcp.load(stock, checkpoint_id=step, no_dist=True)
    for number, (name, one) in enumerate(whole.items()):
        wanted = torch.arange(one.numel(), dtype=torch.float32).reshape(one.shape) + number
        assert torch.equal(one, wanted) and torch.equal(stock["model"][name], wanted), name


def test_stages_with_meshes_of_their_own(tmp_path: Path) -> None:
    harness.run(manifests.save_stages, 4, str(tmp_path))
    harness.run(manifests.restore_stages, 4, str(tmp_path))
    checkpoint = _native.Checkpoint(tmp_path, step=1)
    paths = {name: path for name, path, *_ in checkpoint.entries}
    assert paths["stage0.0.lr"] == ("stage0", 0, "lr")
    assert paths["stage1.0.lr"] == ("stage1", 0, "lr")
    assert paths["model.1.3"] == ("model", "1.3")
    # Both stages hold it, cut alike: it is stored once.
    assert sorted(offsets[0] for offsets, _ in checkpoint.chunks("model.embedding")) == [0, 5]
    whole = torch.zeros(9, 2)
    with forebay.Checkpointer(tmp_path) as checkpoints:
        checkpoints.restore({"model": {"embedding": whole}}, 1, strict=False)
    assert torch.equal(whole, torch.arange(18, dtype=torch.float32).reshape(9, 2))
