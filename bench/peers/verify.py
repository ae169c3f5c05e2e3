"""Compares what a loader delivered with the file, after the clock has stopped.

Two ways, both exact about names, dtypes and shapes:
- `exact`: every byte of every tensor against the bytes `pread` gives, in pieces;
- `digest`: a 64-bit digest of every tensor, computed where the tensor lies, against the digest
  computed once from the file by NumPy. The digest is a sum of the 8-byte words, each times an odd
  weight of its position, modulo 2^64: one wrong word always changes it, and so does any swap of
  unlike words by all but a vanishing chance.
"""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from peers import data

PIECE_WORDS = 1 << 20
COMPARE_BYTES = 64 << 20
GOLDEN = data.GOLDEN
MASK = (1 << 64) - 1
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64",
               "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
               "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def _weights():
    import numpy as np

    at = np.arange(PIECE_WORDS, dtype=np.uint64)
    return (at * np.uint64(GOLDEN)) | np.uint64(1)


def _piece_weight(index: int) -> int:
    return ((index + 1) * 0xD1B54A32D192ED03 | 1) & MASK


# The file's side -----------------------------------------------------------------------------


def reference(folder: Path, threads: int | None = None) -> dict[str, str]:
    """Digest of every tensor from the file. Kept beside the model, valid while the files are."""
    files = data.shard_files(folder)
    stamp = {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in files}
    keep = (folder if folder.is_dir() else folder.parent) / "bench-digests.json"
    try:
        found = json.loads(keep.read_text())
        if found["files"] == stamp:
            return found["digests"]
    except (OSError, ValueError, KeyError):
        pass
    root = folder if folder.is_dir() else folder.parent
    digests = _digest_files(root, data.catalog(folder), threads or min(16, os.cpu_count() or 1))
    try:
        keep.write_text(json.dumps({"files": stamp, "digests": digests}))
    except OSError:
        pass
    return digests


def _digest_files(root: Path, entries, threads: int) -> dict[str, str]:
    import numpy as np

    weights, local = _weights(), threading.local()
    fds = {name: os.open(root / name, os.O_RDONLY) for name in {e.file for e in entries}}

    def piece(job) -> int:
        entry, index = job
        if not hasattr(local, "raw"):
            local.raw = np.empty(PIECE_WORDS, dtype=np.uint64)
            local.product = np.empty(PIECE_WORDS, dtype=np.uint64)
        at = index * PIECE_WORDS * 8
        nbytes = min(PIECE_WORDS * 8, entry.nbytes - at)
        words = -(-nbytes // 8)
        local.raw[words - 1 : words] = 0
        _read_exactly(fds[entry.file], memoryview(local.raw).cast("B")[:nbytes], entry.offset + at)
        np.multiply(local.raw[:words], weights[:words], out=local.product[:words])
        return int(local.product[:words].sum()) * _piece_weight(index) & MASK

    jobs = [(e, i) for e in entries for i in range(max(0, -(-e.nbytes // (PIECE_WORDS * 8))))]
    sums = {e.name: 0 for e in entries}
    try:
        with ThreadPoolExecutor(threads) as pool:
            for (entry, _), value in zip(jobs, pool.map(piece, jobs)):
                sums[entry.name] = (sums[entry.name] + value) & MASK
    finally:
        for fd in fds.values():
            os.close(fd)
    return {name: f"{value:016x}" for name, value in sums.items()}


def _read_exactly(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            raise EOFError("the file ended before the tensor did")
        done += got


# The loader's side ---------------------------------------------------------------------------


def _bytes_of(tensor):
    """A flat uint8 view of a torch tensor (or NumPy array), without a copy where it can be had."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        tensor = torch.from_numpy(tensor)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def _words_of(flat):
    import torch

    whole = flat.numel() // 8 * 8
    if flat.data_ptr() % 8 or flat.storage_offset() % 8 or whole != flat.numel():
        padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: flat.numel()] = flat
        return padded.view(torch.int64)
    return flat.view(torch.int64)


def same_names(out: dict, entries) -> list[str]:
    """What differs in names, dtypes and shapes; empty when nothing does."""
    wrong = [f"missing {name}" for name in {e.name for e in entries} - out.keys()]
    wrong += [f"unexpected {name}" for name in out.keys() - {e.name for e in entries}]
    for entry in entries:
        if (got := out.get(entry.name)) is None:
            continue
        if tuple(got.shape) != entry.shape:
            wrong.append(f"{entry.name}: shape {tuple(got.shape)}, expected {entry.shape}")
        expected = TORCH_NAMES.get(entry.dtype)
        if expected and str(got.dtype).removeprefix("torch.") != expected:
            wrong.append(f"{entry.name}: dtype {got.dtype}, expected {expected}")
    return wrong


def by_digest(out: dict, entries, digests: dict[str, str], device: str) -> dict:
    import numpy as np
    import torch

    wrong = same_names(out, entries)
    weights = torch.from_numpy(_weights().view(np.int64)).to(device)
    sums, owners = [], []
    for entry in entries:
        if entry.name not in out or entry.nbytes == 0:
            continue
        words = _words_of(_bytes_of(out[entry.name]))
        for index, at in enumerate(range(0, words.numel(), PIECE_WORDS)):
            piece = words[at : at + PIECE_WORDS]
            sums.append((piece * weights[: piece.numel()]).sum())
            owners.append((entry.name, index))
    totals = {e.name: 0 for e in entries}
    if sums:
        for (name, index), value in zip(owners, torch.stack(sums).cpu().tolist()):
            totals[name] = (totals[name] + (value & MASK) * _piece_weight(index)) & MASK
    wrong += [f"{name}: digest differs" for name, value in totals.items()
              if name in out and f"{value:016x}" != digests[name]]
    return _verdict("digest of every tensor", wrong, entries)


def by_bytes(out: dict, entries, root: Path, device: str) -> dict:
    import numpy as np
    import torch

    wrong = same_names(out, entries)
    buffer = np.empty(COMPARE_BYTES, dtype=np.uint8)
    fds = {name: os.open(root / name, os.O_RDONLY) for name in {e.file for e in entries}}
    try:
        for entry in entries:
            if entry.name not in out:
                continue
            flat = _bytes_of(out[entry.name])
            if flat.numel() != entry.nbytes:
                wrong.append(f"{entry.name}: {flat.numel()} bytes, expected {entry.nbytes}")
                continue
            for at in range(0, entry.nbytes, COMPARE_BYTES):
                nbytes = min(COMPARE_BYTES, entry.nbytes - at)
                _read_exactly(fds[entry.file], memoryview(buffer)[:nbytes], entry.offset + at)
                expected = torch.from_numpy(buffer[:nbytes]).to(device)
                if not torch.equal(flat[at : at + nbytes], expected):
                    wrong.append(f"{entry.name}: bytes differ in [{at}, {at + nbytes})")
                    break
    finally:
        for fd in fds.values():
            os.close(fd)
    return _verdict("every byte of every tensor", wrong, entries)


def _verdict(how: str, wrong: list[str], entries) -> dict:
    return {"compared": f"{how}, names, dtypes and shapes", "tensors": len(entries),
            "equal": not wrong, "differences": len(wrong), "first_differences": wrong[:5]}
