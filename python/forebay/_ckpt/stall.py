"""How long a save will hold up training.

- With a shadow: the copy within GPU memory, two passes over the bytes, and the launches.
- With a pool as large as the state: the bytes at the rate of the copies into it.
- Staged in memory that outlives the process: the same.
- With a smaller one the copies wait for the disk: what does not fit into the pool, at the rate of the disk.

Rates are measured: before the first save by a copy and, where the disk counts, by a save of a part of the state;
from then on by the saves themselves.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter, time
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.kinds import OWN_TYPES
from forebay._options import Options, engine
from forebay._urls import Place

#: Bytes a second that a GPU copies within its memory: a third of what an H100 reads, so that older ones do it too.
SHADOW_RATE = 1.0e12

#: Seconds that a launch takes; `torch._foreach_copy_` takes about 100 tensors a launch.
LAUNCH_SECONDS = 10e-6
LAUNCH_TENSORS = 100

#: Bytes that are copied, and written, to measure. A disk's own cache is smaller than the second, and what a save takes
#: to get going (15 ms seen) is a tenth of what it takes to write so much into memory.
COPY_BYTES = 256 << 20
WRITE_BYTES = 2 << 30

#: How the folder of a measurement is called, and how many digits follow. It is left where the process is killed.
PROBE_PREFIX = ".forebay-probe-"
_PROBE_DIGITS = 8

#: Files of a measurement that are looked at: it makes a handful.
_PROBE_FILES_MAX = 1000


@dataclass(slots=True)
class Stall:
    """What is known about rates, in bytes a second."""

    copy_rate: float | None = None
    write_rate: float | None = None

    def predict(self, mode: str, size: int, tensors: int, staging_bytes: int) -> float | None:
        """Seconds that a save of `size` bytes holds up training; None as long as a rate is not known."""
        if mode == "shadow":
            return size / SHADOW_RATE + (tensors / LAUNCH_TENSORS + 1) * LAUNCH_SECONDS
        if self.copy_rate is None:
            return None
        copying = size / self.copy_rate
        if mode in ("pool", "staged") or size <= staging_bytes:
            return copying
        if self.write_rate is None:
            return None
        return max(copying, (size - staging_bytes) / self.write_rate)

    def learn(self, report: dict[str, Any]) -> None:
        """Takes rates from a save that was committed."""
        size = int(report.get("tensor_bytes", 0))
        # Small saves are latency.
        if size < COPY_BYTES // 4:
            return
        if report["snapshot"] == "pool" and report["staged_seconds"]:
            self.copy_rate = size / report["staged_seconds"]
        elif report["snapshot"] == "stream" and report["write_seconds"]:
            self.write_rate = size / report["write_seconds"]

    def measure(
        self,
        device: str,
        directory: Place,
        pool: _native.Pool,
        tensors: Sequence[torch.Tensor],
        size: int,
        staging_bytes: int,
    ) -> None:
        """Measures what a prediction for a state of `size` bytes, among them those of `tensors`, needs."""
        if self.copy_rate is None:
            self.copy_rate = _copy_rate(device, min(size, COPY_BYTES))
        # To a bucket nothing is sent for a guess: the first save tells.
        if isinstance(directory, Path) and size > staging_bytes and self.write_rate is None:
            self.write_rate = _write_rate(device, directory, pool, tensors)


def _copy_rate(device: str, size: int) -> float:
    on_gpu = device.startswith("cuda")
    source = torch.ones(max(size, 1 << 20), dtype=torch.uint8, device=device if on_gpu else "cpu")
    target = torch.empty(source.shape, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
    best = 0.0
    # The first touches the memory.
    for _ in range(3):
        if on_gpu:
            torch.cuda.synchronize(source.device)
        began = perf_counter()
        target.copy_(source)
        best = max(best, source.nbytes / (perf_counter() - began))
    return best


def _write_rate(
    device: str, directory: Path, pool: _native.Pool, tensors: Sequence[torch.Tensor]
) -> float | None:
    """Saves the first of these tensors to a folder beside the steps, as a save does, and removes it. None where too
    little of them lies in one stretch."""
    parts = _first_bytes(device, tensors)
    total = sum(part.nbytes for part in parts)
    if total < COPY_BYTES // 4:
        return None
    home = directory / f"{PROBE_PREFIX}{secrets.token_hex(_PROBE_DIGITS // 2)}"
    items = [
        (f"probe{number}", (), 0, "uint8", (part.nbytes,), (0,), (part.nbytes,), True)
        for number, part in enumerate(parts)
    ]
    on_gpu = [part.is_cuda for part in parts]
    stream = torch.cuda.current_stream(device).cuda_stream if any(on_gpu) else None
    try:
        saver = _native.Saver(
            home,
            rank=0,
            world=1,
            run_id=secrets.token_hex(4),
            engine=engine(device, Options()),
            pool=pool,
            flat=True,
            commit="external",
        )
        saving = saver.start(
            0,
            _native.Structure(items, rank=0, world=1),
            [part.data_ptr() for part in parts],
            bytes(on_gpu),
            [],
            agreed="probe",
            counter=1,
            stream=stream,
            keep=parts,
        )
        while not saving.wait(None):
            pass
        return total / max(float(saving.report()["write_seconds"]), 1e-9)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def collect_probes(
    directory: Place, grace_s: float, dry_run: bool = False
) -> list[tuple[str, int]]:
    """Removes what measurements left whose process was killed, once nothing of it changed for `grace_s` seconds: one
    that runs takes seconds. Returns names and bytes of what was removed, or would be. Errors: `OSError`."""
    removed: list[tuple[str, int]] = []
    if not isinstance(directory, Path):
        return removed
    for name in os.listdir(directory):
        digits = name.removeprefix(PROBE_PREFIX)
        if digits == name or len(digits) != _PROBE_DIGITS or set(digits) - set("0123456789abcdef"):
            continue
        found = _size_and_age(directory / name)
        if found is None or found[1] < grace_s:
            continue
        if not dry_run:
            shutil.rmtree(directory / name, ignore_errors=True)
        if dry_run or not os.path.lexists(directory / name):
            removed.append((name, found[0]))
    return removed


def _size_and_age(folder: Path) -> tuple[int, float] | None:
    """Bytes of a folder's files, and seconds since any of them changed; None for what is no folder, or gone."""
    try:
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode):
            return None
        size, newest = 0, info.st_mtime
        for path in islice(folder.rglob("*"), _PROBE_FILES_MAX):
            info = os.lstat(path)
            size += info.st_size if stat.S_ISREG(info.st_mode) else 0
            newest = max(newest, info.st_mtime)
    except FileNotFoundError:
        return None
    return size, time() - newest


def _first_bytes(device: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of as many bytes of the state as a measurement takes."""
    left, parts = WRITE_BYTES, []
    for tensor in tensors:
        here = tensor.is_cpu or device == f"cuda:{tensor.device.index}"
        lazy = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
        if type(tensor) not in OWN_TYPES or lazy or not (here and tensor.is_contiguous()):
            continue
        flat = tensor.detach().view(-1).view(torch.uint8)[:left]
        if flat.nbytes:
            parts.append(flat)
        left -= flat.nbytes
    return parts
