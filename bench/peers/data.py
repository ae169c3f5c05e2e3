"""Makes safetensors models to load, and reads the catalog of one.

The bytes are random and incompressible, yet 16 GB take seconds: one random block of 64 MiB is made
once, and every 8 MiB piece of the files is a slice of it XORed with a 64-bit key of its own, so no
two pieces are equal and neither a compressing nor a deduplicating store gains from them. The
writer is its own (header, then bytes): the data does not depend on any library under test.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

INDEX = "model.safetensors.index.json"
MARKER = "bench.json"
PIECE_BYTES = 8 << 20
BLOCK_BYTES = 64 << 20
GOLDEN = 0x9E3779B97F4A7C15
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "U8": 1, "I8": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of a model: what the header says, and the absolute offset of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


# Shapes --------------------------------------------------------------------------------------


def llm_shapes(gb: float) -> list[tuple[str, list[int]]]:
    """Llama-like layers: 8B widths below 32 GB (32 layers are the real 16.06 GB), 70B above."""
    hidden, ffn, kv, vocab = 4096, 14336, 1024, 128256
    if gb >= 32:
        hidden, ffn = 8192, 28672
    if gb < 8:
        vocab = 32000
    if gb < 2:
        hidden, ffn, kv, vocab = 1024, 3584, 256, 8000
    layer = 2 * (2 * hidden * hidden + 2 * kv * hidden + 3 * ffn * hidden + 2 * hidden)
    ends = 2 * (2 * vocab * hidden + hidden)
    layers = max(1, round((gb * 1e9 - ends) / layer))
    out = [("model.embed_tokens.weight", [vocab, hidden])]
    for i in range(layers):
        at = f"model.layers.{i}."
        out += [
            (at + "input_layernorm.weight", [hidden]),
            (at + "mlp.down_proj.weight", [hidden, ffn]),
            (at + "mlp.gate_proj.weight", [ffn, hidden]),
            (at + "mlp.up_proj.weight", [ffn, hidden]),
            (at + "post_attention_layernorm.weight", [hidden]),
            (at + "self_attn.k_proj.weight", [kv, hidden]),
            (at + "self_attn.o_proj.weight", [hidden, hidden]),
            (at + "self_attn.q_proj.weight", [hidden, hidden]),
            (at + "self_attn.v_proj.weight", [kv, hidden]),
        ]
    return out + [("model.norm.weight", [hidden]), ("lm_head.weight", [vocab, hidden])]


def uniform_shapes(total_bytes: int, tensor_bytes: int) -> list[tuple[str, list[int]]]:
    count = max(1, round(total_bytes / tensor_bytes))
    columns = 256 if tensor_bytes % 512 == 0 else tensor_bytes // 2
    rows = tensor_bytes // 2 // columns
    return [(f"block.{i // 100}.tensor.{i}", [rows, columns]) for i in range(count)]


def shapes_of(kind: str, gb: float | None) -> list[tuple[str, list[int]]]:
    if kind == "llm":
        return llm_shapes(16 if gb is None else gb)
    if kind == "large":
        return uniform_shapes(int((16 if gb is None else gb) * 1e9), 256 << 20)
    if kind == "small":
        # 20,000 tensors of 64 KiB unless another size is asked for.
        return uniform_shapes(20_000 * 65_536 if gb is None else int(gb * 1e9), 65_536)
    raise ValueError(f"unknown kind of tensors {kind!r}: small, large or llm")


# Writing -------------------------------------------------------------------------------------


def split_shards(shapes, shards: int) -> list[list[tuple[str, list[int], int]]]:
    """Consecutive runs of about equal bytes, as model hubs cut their files."""
    sized = [(name, shape, 2 * _product(shape)) for name, shape in shapes]
    total, out, done = sum(n for _, _, n in sized), [[] for _ in range(shards)], 0
    for item in sized:
        out[min(shards - 1, int((done + item[2] / 2) * shards / total))].append(item)
        done += item[2]
    return [run for run in out if run]


def _product(shape) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def header_bytes(run) -> bytes:
    table, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, nbytes in run:
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _Filler:
    """Writes piece after piece of a file, each from a buffer of the thread that writes it."""

    def __init__(self, seed: int):
        import numpy as np

        self.np = np
        words = np.random.Generator(np.random.SFC64(seed)).integers(
            0, 1 << 64, BLOCK_BYTES // 8, dtype=np.uint64
        )
        # The first piece again at the end, so that any slice that starts in the block is whole.
        self.block = np.concatenate([words, words[: PIECE_BYTES // 8]])
        self.local = threading.local()

    def write(self, fd: int, offset: int, nbytes: int, counter: int) -> None:
        np, words = self.np, -(-nbytes // 8)
        if not hasattr(self.local, "buffer"):
            self.local.buffer = np.empty(PIECE_BYTES // 8, dtype=np.uint64)
        start = (counter * 1_000_003) % (BLOCK_BYTES // 8)
        key = np.uint64(((counter + 1) * GOLDEN) % (1 << 64))
        out = self.local.buffer[:words]
        np.bitwise_xor(self.block[start : start + words], key, out=out)
        view, done = memoryview(out).cast("B")[:nbytes], 0
        while done < nbytes:
            done += os.pwrite(fd, view[done:], offset + done)


def make(folder: Path, kind: str, gb: float | None, shards: int, seed: int = 1,
         threads: int | None = None, sync: bool = True) -> dict:
    """Makes the model in `folder`, or keeps the same one found there. Returns its facts."""
    shapes = shapes_of(kind, gb)
    wanted = {"kind": kind, "shards": shards, "seed": seed, "tensors": len(shapes),
              "bytes": sum(2 * _product(shape) for _, shape in shapes)}
    found = facts(folder)
    if found and all(found.get(key) == value for key, value in wanted.items()):
        return {**found, "reused": True}
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARKER).exists():
            raise SystemExit(f"{folder} holds something else: give an empty folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARKER).write_text(json.dumps({"unfinished": True}))
    runs = split_shards(shapes, shards)
    names = [f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors" for i in range(len(runs))]
    sizes = _write_files(folder, names, runs, seed, threads or min(16, os.cpu_count() or 1), sync)
    index = {"metadata": {"total_size": wanted["bytes"]},
             "weight_map": {name: file for file, run in zip(names, runs) for name, _, _ in run}}
    (folder / INDEX).write_text(json.dumps(index))
    made = {**wanted, "files": dict(zip(names, sizes))}
    (folder / MARKER).write_text(json.dumps(made))
    return {**made, "reused": False}


def _write_files(folder, names, runs, seed, threads, sync) -> list[int]:
    filler, sizes, counter = _Filler(seed), [], 0
    with ThreadPoolExecutor(threads) as pool:
        for name, run in zip(names, runs):
            head, payload = header_bytes(run), sum(n for _, _, n in run)
            fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                _preallocate(fd, len(head) + payload)
                os.pwrite(fd, head, 0)
                jobs = []
                for at in range(0, payload, PIECE_BYTES):
                    nbytes = min(PIECE_BYTES, payload - at)
                    jobs.append(pool.submit(filler.write, fd, len(head) + at, nbytes, counter))
                    counter += 1
                for job in jobs:
                    job.result()
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            sizes.append(len(head) + payload)
    return sizes


def _preallocate(fd: int, nbytes: int) -> None:
    """Long extents, as a downloaded file has; many threads writing would fragment it."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.ftruncate(fd, nbytes)


def facts(folder: Path) -> dict | None:
    """What `make` wrote about the model in `folder`, if it is still whole."""
    try:
        found = json.loads((folder / MARKER).read_text())
        sizes = {name: (folder / name).stat().st_size for name in found["files"]}
    except (OSError, ValueError, KeyError):
        return None
    return found if sizes == found["files"] else None


# Reading -------------------------------------------------------------------------------------


def shard_files(folder: Path) -> list[Path]:
    """The files of a model: those the index names, else every safetensors file, else itself."""
    if folder.is_file():
        return [folder]
    index = folder / INDEX
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values())
        return [folder / name for name in sorted(named)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"no safetensors files in {folder}")
    return files


def catalog(folder: Path) -> list[Entry]:
    out = []
    for path in shard_files(folder):
        with open(path, "rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            table = json.loads(file.read(size))
        table.pop("__metadata__", None)
        for name, item in table.items():
            start, end = item["data_offsets"]
            out.append(Entry(name, item["dtype"], tuple(item["shape"]), path.name,
                             8 + size + start, end - start))
    return out
