"""Helpers of the tests: files made by hand, scripts run apart."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F4": torch.float4_e2m1fn_x2,
}
NAMES = {dtype: name for name, dtype in TORCH.items()}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, whatever its dtype."""
    # No clone: that of a bool tensor makes its bytes 0 and 1.
    tensor = tensor.detach().cpu().contiguous()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return bytes(flat.view(torch.uint8).numpy()) if tensor.numel() else b""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits of a dtype (0 and 1 for bool)."""
    generator = np.random.default_rng(seed)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    top = 2 if dtype == torch.bool else 256
    data = torch.from_numpy(generator.integers(0, top, count, dtype=np.uint8))
    return data.view(dtype).reshape(shape)


def write_unaligned(path: Path, tensors: dict[str, torch.Tensor], start: int = 1) -> None:
    """A file whose data starts at a byte that is `start` modulo 8, tensors in the order given."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        if tensor.dtype == torch.float4_e2m1fn_x2:
            shape[-1] *= 2
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": shape,
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * ((start - 8 - len(text)) % 8)
    assert (8 + len(text)) % 8 == start % 8
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(raw(tensor))


def write_sparse(path: Path, sizes: dict[str, int]) -> None:
    """A file of U8 tensors that are holes: large, and no trouble to write."""
    header: dict[str, Any] = {}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def run_script(code: str, *arguments: object, timeout: float = 120) -> str:
    """Runs a program with this interpreter; returns what it printed. A failure shows its output."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=dict(os.environ),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
