"""Checkpoints written by our encoders (the example `write_dcp`), from a state that a test describes.

Imports nothing of Forebay: what reads these checkpoints is stock torch, of any version.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

ROOT = Path(__file__).resolve().parents[3]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major, whatever its dtype."""
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits of a dtype (0 and 1 for bool)."""
    tensor = torch.empty(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 256
    count = tensor.numel() * tensor.element_size()
    data = torch.randint(0, top, (count,), generator=generator, dtype=torch.uint8)
    ctypes.memmove(tensor.data_ptr(), data.data_ptr(), count)
    return tensor


def encoder(cache: list[Path] = []) -> Path:  # noqa: B006  built once
    """The program that writes: `FOREBAY_WRITE_DCP`, or built from this checkout."""
    if given := os.environ.get("FOREBAY_WRITE_DCP"):
        return Path(given)
    if not cache:
        if shutil.which("cargo") is None:
            pytest.skip("no cargo to build the encoder with, and no FOREBAY_WRITE_DCP")
        build = ["cargo", "build", "-q", "--locked", "-p", "forebay-format"]
        command = [*build, "--example", "write_dcp", "--message-format=json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        messages = [json.loads(line) for line in done.stdout.splitlines()]
        paths = [message["executable"] for message in messages if message.get("executable")]
        cache.append(Path(paths[-1]))
    return cache[0]


def pieces(shape: tuple[int, ...], dim: int, ranks: int) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of the shards of each rank, as torch cuts: the last ones may be empty."""
    side = -(-shape[dim] // ranks)
    found = []
    for rank in range(ranks):
        start = min(rank * side, shape[dim])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, min(start + side, shape[dim]) - start
        found.append((offsets, sizes))
    return found


class Written:
    """A checkpoint of `state`; `shards` says along which dimension a tensor (by flat name) is cut."""

    def __init__(
        self,
        folder: Path,
        state: dict[str, Any],
        shards: dict[str, int] | None = None,
        *,
        ranks: int = 2,
        files: int = 1,
    ) -> None:
        self.folder = folder / "ckpt"
        self.flat, self.paths = flatten_state_dict(state)
        self.ranks = ranks
        self.data = bytearray()
        entries = [self._entry(name, (shards or {}).get(name)) for name in self.flat]
        data = folder / "data.bin"
        data.write_bytes(self.data)
        write(self.folder, entries, data, ranks=ranks, files=files)

    def _entry(self, name: str, dim: int | None) -> dict[str, Any]:
        value = self.flat[name]
        entry: dict[str, Any] = {"name": name, "path": list(self.paths[name])}
        rank = len(name) % self.ranks
        if not isinstance(value, torch.Tensor):
            content = pickle.dumps(value, protocol=2)
            chunk = {"rank": rank, "at": self._store(content), "len": len(content)}
            return entry | {"chunks": [chunk]}
        shape = tuple(value.shape)
        whole = [(rank, [0] * len(shape), list(shape))]
        if dim is not None:
            cut = pieces(shape, dim, self.ranks)
            whole = [(number, *piece) for number, piece in enumerate(cut)]
        chunks = []
        for rank, offsets, sizes in whole:
            part = value
            for side, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(side, offset, size)
            at = self._store(raw(part))
            chunks.append({"rank": rank, "offsets": offsets, "sizes": sizes, "at": at})
        dtype = str(value.dtype).removeprefix("torch.")
        return entry | {"dtype": dtype, "shape": list(shape), "chunks": chunks}

    def _store(self, content: bytes) -> int:
        at = len(self.data)
        self.data += content
        return at


def write(
    folder: Path, entries: list[dict[str, Any]], data: Path, *, ranks: int = 1, files: int = 1
) -> None:
    """Hands a description to the encoder."""
    spec = {
        "ranks": ranks,
        "files": files,
        "min_file_bytes": 1,
        "large_bytes": 65536,
        "data": str(data),
        "entries": entries,
    }
    place = data.with_suffix(".json")
    place.write_text(json.dumps(spec))
    done = subprocess.run(
        [encoder(), place, folder], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
