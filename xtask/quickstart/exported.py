"""Compares an export, and the step that it was made from, with the digests of what was trained.

Three readers look at the same tensors, and share no code: `forebay.load_file` and the safetensors library at the export, stock
`torch.distributed.checkpoint` at the step.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path

import forebay
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

#: How names of the model's tensors begin in a step. The export has them without.
MODEL = "model."


def differences(exported: Path, step: Path, trained: Mapping[str, str]) -> list[str]:
    """What each reader finds that differs from the SHA-256 of what was trained, as `reader: name`."""
    theirs = {}
    for path in sorted(exported.glob("*.safetensors")):
        theirs |= load_file(path)
    found = [
        ("forebay.load_file", forebay.load_file(exported, device="cpu")),
        ("the safetensors library", theirs),
        ("torch.distributed.checkpoint", _by_stock(step)),
    ]
    model = {
        name.removeprefix(MODEL): digest
        for name, digest in trained.items()
        if name.startswith(MODEL)
    }
    return [
        f"{reader}: {name}"
        for reader, tensors in found
        for name in _differing({name: _sha256(tensors[name]) for name in tensors}, model)
    ]


def _by_stock(step: Path) -> dict[str, torch.Tensor]:
    reader = checkpoint.FileSystemReader(step)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # It warns that it loads in one process, which is what it was told to.
        warnings.simplefilter("ignore")
        checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def _differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    names = found.keys() | wanted.keys()
    return sorted(name for name in names if found.get(name) != wanted.get(name))


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
