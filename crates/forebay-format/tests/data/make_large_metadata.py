"""Writes a large `.metadata` with torch's own classes: python3 make_large_metadata.py OUT TENSORS CHUNKS [one]

TENSORS tensors of two sides, each cut by rows into CHUNKS chunks, as a job of CHUNKS ranks leaves it. Texts and sizes are
shared inside one rank's part and not between ranks, as they are after torch has gathered the parts of all ranks; with
`one` they are shared by all, and the state is not flattened, so that the file is as small as torch makes it.
"""

import pickle
import sys

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

ROWS, COLUMNS = 16, 4096
ITEM_BYTES = ROWS * COLUMNS * 2 + 1100


def name_of(tensor):
    layer, part = divmod(tensor, 10)
    return f"model.layers.{layer}.self_attn.part{part}.weight"


def build(tensors, chunks, one):
    names = [name_of(tensor) for tensor in range(tensors)]
    state, storage, planner = {}, {}, {}
    for name in names:
        properties = TensorProperties(dtype=torch.bfloat16)
        size = torch.Size((ROWS * chunks, COLUMNS))
        state[name] = TensorStorageMetadata(properties, size, [])
        planner[name] = tuple(int(step) if step.isdigit() else step for step in name.split("."))
    for rank in range(chunks):
        offset = torch.Size((rank * ROWS, 0))
        file = f"__{rank}_0.distcp"
        at = 0
        for name in names:
            # What came from another rank came through a pickle: texts of its own.
            name_here = name if one else str(name.encode(), "ascii")
            where = torch.Size(offset)
            state[name].chunks.append(ChunkStorageMetadata(where, torch.Size((ROWS, COLUMNS))))
            index = MetadataIndex(name_here, where, rank)
            storage[index] = _StorageInfo(file, at, ITEM_BYTES)
            at += ITEM_BYTES
    meta = StorageMeta(checkpoint_id="large", save_id="0", load_id=None)
    metadata = Metadata(state, None if one else planner, storage, meta)
    metadata.version = "1.0.0"
    return metadata


if __name__ == "__main__":
    out, tensors, chunks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(out, "wb") as file:
        pickle.dump(build(tensors, chunks, sys.argv[4:] == ["one"]), file, protocol=4)
