"""What happens around a load: changing files, signals, forks, threads, a thousand loads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from support import run_script, same, write_sparse

import forebay

GIB = 1 << 30


def change_during_load(path: Path, change: Callable[[], None]) -> forebay.Error:
    """Loads with one thread and calls `change` when the first bytes have arrived; returns the error."""
    changed = False

    def once(done: int, total: int) -> None:
        nonlocal changed
        if not changed and done < total:
            changed = True
            change()

    with pytest.raises(forebay.Error) as caught:
        forebay.load_file(path, "host", threads=1, progress=once)
    assert changed, "the load was over too soon"
    return caught.value


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_sparse(path, {"a": GIB, "b": GIB})
    error = change_during_load(path, lambda: os.truncate(path, 3 * GIB // 2))
    assert error.code == "file_changed" and str(path) in str(error)


def test_a_file_that_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_sparse(path, {"a": GIB, "b": GIB})

    def write() -> None:
        with open(path, "r+b") as file:
            file.seek(GIB)
            file.write(b"new")

    error = change_during_load(path, write)
    assert isinstance(error, forebay.FileChangedError) and str(path) in str(error)


def test_a_file_that_is_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "m.safetensors", tmp_path / "other"
    write_sparse(path, {"a": GIB, "b": GIB})
    write_sparse(other, {"a": 10})
    error = change_during_load(path, lambda: os.replace(other, path))
    assert isinstance(error, forebay.FileChangedError) and str(path) in str(error)
    assert set(forebay.load_file(path)) == {"a"}


def test_iteration_sees_a_change(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_sparse(path, {f"w.{n}": 64 << 20 for n in range(16)})
    with forebay.safe_open(path) as model:
        arriving = model.iter_tensors(max_bytes=128 << 20)
        next(arriving)
        os.truncate(path, 64 << 20)
        with pytest.raises(forebay.DataError):
            for _ in arriving:
                pass


INTERRUPTED = """
import sys, time, forebay
def tell(done, total):
    if done < total:
        print("loading", flush=True)
try:
    if sys.argv[2] == "load":
        forebay.load_file(sys.argv[1], "host", threads=1, progress=tell)
    elif sys.argv[2] == "hash":
        print("loading", flush=True)
        forebay.load_file(sys.argv[1], "host", names=["small"], expect_sha256="0" * 64)
    else:
        with forebay.safe_open(sys.argv[1], "np", threads=1) as model:
            arriving = model.iter_tensors(names=["small", "w"])
            print("loading", flush=True)
            for name, tensor in arriving:
                pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
    # The engine works on.
    assert forebay.load_file(sys.argv[1], "host", names=["small"])["small"].size == 100
    print("fine", flush=True)
"""


@pytest.mark.parametrize("way", ["load", "iterate", "hash"])
def test_ctrl_c(tmp_path: Path, way: str) -> None:
    path = tmp_path / "m.safetensors"
    write_sparse(path, {"small": 100, "w": 6 * GIB})
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, path, way], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "loading\n"
    if way != "load":
        time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    began = time.monotonic()
    line = child.stdout.readline()
    while line == "loading\n":
        line = child.stdout.readline()
    assert line == "interrupted\n"
    assert time.monotonic() - began < 1
    assert child.stdout.readline() == "fine\n"
    child.stdout.close()
    assert child.wait(timeout=30) == 0


FORKED = """
import os, sys
import numpy as np
import forebay
path = sys.argv[1]
first = forebay.load_file(path, "host")
model = forebay.safe_open(path, "np")
arriving = model.iter_tensors(max_bytes=1)
next(arriving)
child = os.fork()
if child == 0:
    status = 1
    try:
        again = forebay.load_file(path, "host")
        assert all(np.array_equal(again[name], first[name]) for name in first)
        assert np.array_equal(model.get_tensor("w.3"), first["w.3"])
        assert np.array_equal(model.get_slice("w.3")[5:], first["w.3"][5:])
        try:
            next(arriving)
        except forebay.ForkedError as error:
            assert error.code == "forked" and error.hints
            status = 0
    finally:
        import traceback
        traceback.print_exc()
        del arriving, model
        os._exit(status)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert len(list(arriving)) == len(first) - 1
again = forebay.load_file(path, "host")
assert all(np.array_equal(again[name], first[name]) for name in first)
"""


def test_fork(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {f"w.{n}": torch.randn(400_000) for n in range(20)}
    safetensors.torch.save_file(tensors, path)
    run_script(FORKED, path)


def test_threads(tmp_path: Path) -> None:
    tensors = {f"w.{n}": torch.randn(100_000 + n) for n in range(20)}
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                found = forebay.load_file(path)
                assert all(same(found[name], tensors[name]) for name in tensors)
                assert forebay.last_report()["bytes"] == sum(
                    t.numel() * 4 for t in tensors.values()
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_gil_is_free_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_sparse(path, {"w": GIB})
    ticks = 0
    over = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not over.is_set():
            ticks += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    began = time.monotonic()
    forebay.load_file(path, "host", threads=1)
    seconds = time.monotonic() - began
    over.set()
    counter.join()
    assert ticks > seconds * 1000 * 0.2, (ticks, seconds)


def test_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {f"w.{n}": torch.randn(500_000) for n in range(20)}
    safetensors.torch.save_file(tensors, path)
    code = """
import sys, hashlib, forebay
for _ in range(5):
    found = forebay.load_file(sys.argv[1], "host")
    print(hashlib.sha256(b"".join(found[name].tobytes() for name in sorted(found))).hexdigest())
"""
    children = [
        subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = {line for child in children for line in child.communicate(timeout=60)[0].split()}
    assert len(lines) == 1
    assert all(child.returncode == 0 for child in children)


def test_a_thousand_loads(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {f"w.{n}": torch.randn(5000) for n in range(40)}
    tensors["big"] = torch.randn(1 << 20)
    safetensors.torch.save_file(tensors, path)
    code = """
import os, sys, time, forebay
def look():
    # Threads of the last load may still be on their way out.
    time.sleep(0.3)
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 10, len(os.listdir("/proc/self/fd"))
def load(number):
    assert len(forebay.load_file(sys.argv[1], "host")) == 41
    if number % 10 == 0:
        with forebay.safe_open(sys.argv[1], "np") as model:
            for _ in model.iter_tensors(max_bytes=100_000):
                pass
            next(model.iter_tensors())
            model.get_slice("big")[5:10]
        try:
            forebay.load_file(sys.argv[1], "host", expect_sha256="0" * 64)
        except forebay.ChecksumError:
            pass
for number in range(300):
    load(number)
memory, files = look()
for number in range(1000):
    load(number)
later = look()
print(memory, files, *later, len(os.listdir("/proc/self/task")))
assert later[1] == files, (files, later[1])
assert later[0] - memory < 8 << 10, (memory, later[0])
assert len(os.listdir("/proc/self/task")) < 4
"""
    run_script(code, path, timeout=300)


def test_owners_are_kept_until_workers_are_done(tmp_path: Path) -> None:
    """Memory of a cancelled load stays alive as long as a worker may write to it."""
    from forebay import _native

    path = tmp_path / "m.safetensors"
    write_sparse(path, {"w": GIB})
    model = _native.Model.open([path], False)
    for _ in range(5):
        session = _native.Engine("host", {}).start(model, None, threads=1)
        array = np.empty(GIB, np.uint8)
        session.provide([array.ctypes.data], [array], None)
        del array
        assert len(session.owned()) == 1
        time.sleep(0.02)
        assert session.cancel()
        with pytest.raises(forebay.CancelledError):
            session.finish()


def test_misuse_of_sessions(tmp_path: Path) -> None:
    from forebay import _native

    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(10)}, path)
    model = _native.Model.open([path], False)
    session = _native.Engine("host", {}).start(model, None)
    with pytest.raises(forebay.Error):
        session.provide([0], [None])
    with pytest.raises(forebay.Error):
        session.provide([1, 2], [None, None])
    with pytest.raises(forebay.InternalError):
        session.provide([1], [])
    session.cancel()
