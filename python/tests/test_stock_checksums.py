"""Checkpoints of torch: what their archives' checksums say of the bytes is heard, by every way to read them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import forebay
from forebay import Checkpointer
from forebay.dcp import Reader

State = dict[str, torch.Tensor]


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(5)
    state = {
        "large": torch.randn(1_500, 1_000, generator=generator),
        "small": torch.randn(7, generator=generator),
        "across": torch.randn(300, 200, generator=generator).t(),
    }
    dcp.save(state, checkpoint_id=tmp_path / "ck", no_dist=True)
    torch.save(state, tmp_path / "state.pt")
    return tmp_path


def saved(folder: Path) -> State:
    state: State = torch.load(folder / "state.pt")
    return state


def empty(folder: Path) -> State:
    return {name: torch.zeros(value.shape) for name, value in saved(folder).items()}


def by_reader(folder: Path) -> State:
    state: dict[str, Any] = empty(folder)
    dcp.load(state, storage_reader=Reader(folder / "ck"), no_dist=True)
    return state


def by_checkpointer(folder: Path) -> State:
    state = empty(folder)
    with Checkpointer(folder / "mine") as checkpoints:
        report = checkpoints.restore(state, step=folder / "ck")
    assert report.unverified_bytes == 0
    return state


def by_load_file(folder: Path) -> State:
    state: State = forebay.load_file(folder / "ck")
    report = forebay.last_report()
    assert report is not None and report["not_verified"] == [] and report["unverified_bytes"] == 0
    bytes_in_all = sum(value.nbytes for value in state.values())
    assert report["verified_cpu_bytes"] == bytes_in_all
    return state


WAYS = [by_reader, by_checkpointer, by_load_file]


def flip(folder: Path, value: torch.Tensor, at: int) -> int:
    """Flips a bit of byte `at` of a tensor's storage; returns where the storage starts in the file."""
    (file,) = (folder / "ck").glob("*.distcp")
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()).numpy().tobytes()
    start = file.read_bytes().find(storage)
    assert start > 0
    with open(file, "r+b") as opened:
        damaged = storage[at] ^ 4
        os.pwrite(opened.fileno(), bytes([damaged]), start + at)
    return start


@pytest.mark.parametrize("read", WAYS)
@pytest.mark.parametrize(
    ("name", "at"), [("large", 0), ("large", 5_999_999), ("small", 13), ("across", 100_001)]
)
def test_a_flipped_bit_is_found(
    stock: Path, read: Callable[[Path], State], name: str, at: int
) -> None:
    start = flip(stock, saved(stock)[name], at)
    with pytest.raises((forebay.Error, CheckpointException)) as raised:
        read(stock)
    error: Any = raised.value
    if isinstance(error, CheckpointException):
        error = error.failures[0][0]
    assert error.code == "checksum", error
    text = str(error)
    assert "0_0.distcp" in text and f'"{name}"' in text and f"at byte {start} " in text, text


@pytest.mark.parametrize("read", WAYS)
def test_sound_bytes_arrive(stock: Path, read: Callable[[Path], State]) -> None:
    found = read(stock)
    assert all(torch.equal(found[name], value) for name, value in saved(stock).items())


_HALVES = """
import os, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from forebay import Checkpointer
from forebay._ckpt.restoring import Request

# Without memory to share, each rank reads its own half.
Request.__init__.__defaults__ = tuple(
    0 if one == 1 << 30 else one for one in Request.__init__.__defaults__
)

def main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    into = distribute_tensor(torch.zeros(1500, 1000), mesh, [Shard(0)])
    with Checkpointer(folder + "/mine") as checkpoints:
        report = checkpoints.restore({"large": into}, step=folder + "/ck", strict=False)
    wanted = torch.load(folder + "/state.pt")["large"][rank * 750 : rank * 750 + 750]
    assert torch.equal(into.to_local(), wanted)
    assert report.unverified_bytes == 750 * 4000, report
    assert any("not verified: 3000000 bytes" in line for line in report.warnings), report
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
    print("both")
"""


def test_what_is_read_in_part_is_said_not_to_be_verified(stock: Path) -> None:
    script = stock / "halves.py"
    script.write_text(_HALVES)
    done = subprocess.run(
        [sys.executable, script, stock], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "both", done.stderr
