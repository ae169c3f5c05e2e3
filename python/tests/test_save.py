"""Saving: the library's bytes, its refusals, whole files or none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TORCH, random_tensor, same
from torch import nn

import forebay
from forebay._save import parse_size


def both(tensors: object, folder: Path, metadata: object = None) -> tuple[bytes, bytes]:
    forebay.save_file(tensors, folder / "ours", metadata)
    safetensors.torch.save_file(tensors, folder / "theirs", metadata)
    return (folder / "ours").read_bytes(), (folder / "theirs").read_bytes()


def test_the_bytes_of_the_library(tmp_path: Path) -> None:
    tensors = {
        f"{name}.{number}": random_tensor(dtype, shape, number)
        for name, dtype in TORCH.items()
        for number, shape in enumerate([(3, 4), (0, 2), (1,), (2, 3, 5)])
    }
    for metadata in (None, {}, {"format": "pt"}, {"naïve": 'q"uote\n'}):
        ours, theirs = both(tensors, tmp_path, metadata)
        assert ours == theirs
    ours, theirs = both({"scalar": torch.tensor(3.0)}, tmp_path)
    assert ours == theirs
    ours, theirs = both({}, tmp_path)
    assert ours == theirs


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
            lambda n: n != "__metadata__"
        ),
        st.tuples(
            st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), min_size=1, max_size=3)
        ),
        max_size=8,
    )
)
def test_the_bytes_of_the_library_for_any_names(
    tmp_path_factory: pytest.TempPathFactory, plan: dict[str, tuple[str, list[int]]]
) -> None:
    tensors = {
        name: random_tensor(TORCH[dtype], tuple(shape), number)
        for number, (name, (dtype, shape)) in enumerate(plan.items())
    }
    ours, theirs = both(tensors, tmp_path_factory.getbasetemp())
    assert ours == theirs


def test_large_files_by_many_threads(tmp_path: Path) -> None:
    tensors = {f"w.{n}": torch.randn(1_300_000) for n in range(12)}
    ours, theirs = both(tensors, tmp_path)
    assert ours == theirs


def test_arrays(tmp_path: Path) -> None:
    arrays = {
        "f": np.arange(6.0).reshape(2, 3),
        "i": np.arange(4, dtype=np.int16),
        "big": np.arange(5, dtype=">i4"),
        "b": np.array([True, False]),
    }
    forebay.save_file(arrays, tmp_path / "ours")
    safetensors.numpy.save_file(arrays, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with pytest.raises(forebay.UsageError, match="not contiguous"):
        forebay.save_file({"w": np.zeros((4, 4)).T[1:]}, tmp_path / "x")
    with pytest.raises(forebay.UnsupportedError):
        forebay.save_file({"w": np.zeros(3, "U4")}, tmp_path / "x")


def test_the_refusals_of_the_library(tmp_path: Path) -> None:
    base = torch.zeros(4, 4)
    bad = {
        "shared": {"a": base, "b": base},
        "views": {"a": base[:3], "b": base[2:]},
        "contiguous": {"a": base.t()},
        "sparse": {"a": torch.eye(3).to_sparse()},
        "kind": {"a": [1, 2]},
        "no dict": [base],
    }
    for name, tensors in bad.items():
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            safetensors.torch.save_file(tensors, tmp_path / "x")
        with pytest.raises(type(theirs.value)) as ours:
            forebay.save_file(tensors, tmp_path / "y")
        assert isinstance(ours.value, forebay.UsageError), name
        assert ours.value.hints or name in ("kind", "no dict")
    with pytest.raises(forebay.UnsupportedError):
        forebay.save_file({"a": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "y")
    with pytest.raises(forebay.UsageError, match="meta"):
        forebay.save_file({"a": torch.zeros(2, device="meta")}, tmp_path / "y")
    with pytest.raises(forebay.UsageError):
        forebay.save_file({"a": base}, tmp_path / "y", metadata={"a": 1})
    # Parts of one tensor that do not overlap are fine for both.
    ours, theirs = both({"a": base[:2], "b": base[2:]}, tmp_path)
    assert ours == theirs
    assert not (tmp_path / "y").exists()
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]


def test_conjugates_are_resolved(tmp_path: Path) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    forebay.save_file({"w": tensor.conj()}, tmp_path / "m.safetensors")
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")["w"]
    assert torch.equal(found, tensor.conj().resolve_conj())


def test_a_module(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[1].weight = net[0].weight
    forebay.save_model(net, tmp_path / "ours")
    safetensors.torch.save_model(net, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_sharded(tmp_path: Path) -> None:
    tensors = {f"w.{n}": torch.randn(1000) for n in range(10)} | {"big": torch.randn(9000)}
    folder = tmp_path / "new" / "model"
    files = forebay.save_sharded(tensors, folder, "9KB", {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors.values())
    for name in files:
        for key, tensor in safetensors.torch.load_file(folder / name).items():
            assert same(tensor, tensors[key])
    found = forebay.load_file(folder)
    assert all(same(found[name], tensors[name]) for name in tensors)
    assert forebay.safe_open(folder).metadata() == {"format": "pt"}
    # A smaller model in its place: the old files go.
    assert forebay.save_sharded({"w": torch.ones(3)}, folder) == ["model.safetensors"]
    assert set(forebay.load_file(folder)) == {"w"}
    assert os.listdir(folder) == ["model.safetensors"]


def test_sizes() -> None:
    assert parse_size("5GB") == 5 * 10**9 and parse_size("2GiB") == 2 << 30
    assert parse_size("1.5MB") == 1_500_000 and parse_size(7) == 7 and parse_size("10") == 10
    for bad in ("", "GB", "0", "-1", 0, True, None, "5XB", "0.1B"):
        with pytest.raises(forebay.UsageError):
            parse_size(bad)


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        forebay.save_file({"w": torch.ones(2)}, tmp_path / "none" / "m.safetensors")
    (tmp_path / "folder").mkdir()
    with pytest.raises(forebay.AlreadyExistsError):
        forebay.save_file({"w": torch.ones(2)}, tmp_path / "folder")
    assert os.listdir(tmp_path) == ["folder"]


SLOW_SAVE = """
import sys, torch, forebay
tensors = {f"w.{n}": torch.full((8 << 20,), float(n)) for n in range(24)}
print("go", flush=True)
while True:
    forebay.save_file(tensors, sys.argv[1])
    print("saved", flush=True)
"""


def test_a_killed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    old = {"w": torch.arange(1000.0)}
    forebay.save_file(old, path)
    before = path.read_bytes()
    child = subprocess.Popen([sys.executable, "-c", SLOW_SAVE, path], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"go\n"
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob(".forebay-tmp-*")) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert list(tmp_path.glob(".forebay-tmp-*")), "the save was over before it was killed"
    assert path.read_bytes() == before
    assert same(forebay.load_file(path)["w"], old["w"])
    # The next save finds what the dead process left and removes it.
    forebay.save_file(old, path)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    forebay.save_file({"w": torch.arange(1000.0)}, path)
    before = path.read_bytes()
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_SAVE, path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    assert child.stdout.readline() == b"go\n"
    while not list(tmp_path.glob(".forebay-tmp-*")):
        time.sleep(0.001)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors
    assert path.read_bytes() == before


#: `fsync` that takes two seconds, and says on standard output that it began.
SLOW_FSYNC = """
#include <unistd.h>
int fsync(int fd) { write(1, "sync\\n", 5); sleep(2); (void)fd; return 0; }
"""

SAVE_ONCE = """
import sys, time, torch, forebay
tensors = {f"w.{n}": torch.full((1000,), float(n)) for n in range(4)}
try:
    if sys.argv[1] == "file":
        forebay.save_file(tensors, sys.argv[2])
    else:
        forebay.save_sharded(tensors, sys.argv[2], int(sys.argv[3]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    # The thread that commits must have had the time to do harm.
    time.sleep(4)
"""


@pytest.mark.parametrize("form", ["file", "one", "sharded"])
def test_a_save_interrupted_in_its_commit_publishes_nothing(tmp_path: Path, form: str) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for a slow fsync")
    source, library = tmp_path / "slow.c", tmp_path / "slow.so"
    source.write_text(SLOW_FSYNC)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    folder = tmp_path / "model"
    folder.mkdir()
    old = {f"w.{n}": torch.full((1000,), 7.0) for n in range(4)}
    limit = 4000 if form == "sharded" else 1 << 20
    dest = folder
    if form == "file":
        dest = folder / "m.safetensors"
        forebay.save_file(old, dest)
    else:
        forebay.save_sharded(old, folder, limit)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    child = subprocess.Popen(
        [sys.executable, "-c", SAVE_ONCE, form, dest, str(limit)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LD_PRELOAD": str(library)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "sync\n"
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    lines = iter(child.stdout.readline, "")
    assert next(line for line in lines if line != "sync\n") == "interrupted\n"
    assert time.monotonic() - began < 1
    child.communicate(timeout=30)
    assert child.returncode == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
