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


@pytest.mark.parametrize("named", [None, ["w.0", "w.1", "w.5"]])
def test_iteration_hands_out_nothing_that_was_read_after_a_change(
    tmp_path: Path, named: list[str] | None
) -> None:
    path = tmp_path / "m.safetensors"
    old = {f"w.{n}": torch.full((4096,), float(n)) for n in range(8)}
    safetensors.torch.save_file(old, path)
    new = safetensors.torch.save({name: tensor + 100 for name, tensor in old.items()})
    with forebay.safe_open(path) as model:
        # So that each is read when it is asked for.
        arriving = model.iter_tensors(named, max_bytes=1)
        name, tensor = next(arriving)
        assert same(tensor, old[name])
        # Times of files count in ticks of the kernel, of 10 ms at the most.
        time.sleep(0.05)
        path.write_bytes(new)
        with pytest.raises(forebay.FileChangedError, match="m.safetensors"):
            next(arriving)
    with forebay.safe_open(path) as model:
        arriving = model.iter_tensors(max_bytes=1)
        name, tensor = next(arriving)
        time.sleep(0.05)
        path.write_bytes(new)
        # What was read before the change is right, and nobody asks for more.
        arriving.close()
        assert same(tensor, old[name] + 100)


def test_an_iterator_left_after_the_model_was_closed(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({f"w.{n}": torch.ones(4096) for n in range(8)}, path)
    with forebay.safe_open(path) as model:
        arriving = model.iter_tensors(max_bytes=1)
        other = model.iter_tensors(max_bytes=1)
        next(arriving), next(other)
    # As the garbage collector does it, where nobody could catch an error.
    arriving.close()
    with pytest.raises(forebay.UsageError, match="closed"):
        next(other)


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


FORKED_BESIDE = """
import os, sys, threading, time, traceback
import forebay
path = sys.argv[1]
# A module that a thread imports stays half imported in a child.
forebay.load_file(path, "host")
over = threading.Event()
def load():
    while not over.is_set():
        forebay.load_file(path, "host")
        # A new engine each time: its device is opened.
        forebay.release_memory()
threads = [threading.Thread(target=load) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(40):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            found = forebay.load_file(path, "host")
            status = 0 if len(found) == 20 else 1
        finally:
            traceback.print_exc()
            os._exit(status)
    deadline = time.monotonic() + 20
    done, status = 0, 0
    while not done:
        done, status = os.waitpid(child, os.WNOHANG)
        if time.monotonic() > deadline:
            print("the child hangs", flush=True)
            os.kill(child, 9)
            os._exit(1)
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(status) == 0
over.set()
for thread in threads:
    thread.join()
"""


def test_fork_beside_loads(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({f"w.{n}": torch.randn(1000) for n in range(20)}, path)
    run_script(FORKED_BESIDE, path)


EXITS = {
    "loaded": "forebay.load_file(path, 'host')",
    "iterating": "it = forebay.safe_open(path, 'np').iter_tensors(max_bytes=1); next(it)",
    "cancelled": "next(forebay.safe_open(path, 'np').iter_tensors(max_bytes=1))",
    "thread": """
def load():
    while True:
        forebay.load_file(path, 'host', progress=lambda done, total: going.set())
going = threading.Event()
threading.Thread(target=load, daemon=True).start()
going.wait()
""",
    "forked": """
forebay.load_file(path, 'host')
it = forebay.safe_open(path, 'np').iter_tensors(max_bytes=1); next(it)
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
}


@pytest.mark.parametrize("way", EXITS)
def test_exit_while_threads_are_at_work(tmp_path: Path, way: str) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({f"w.{n}": torch.randn(500_000) for n in range(10)}, path)
    # The hooks of the exit run in the order opposite to that of their registration.
    code = f"""
import atexit, os, sys, threading, time
began = []
atexit.register(lambda: print(time.monotonic() - began[0]))
import forebay
atexit.register(lambda: began.append(time.monotonic()))
path = sys.argv[1]
{EXITS[way]}
"""
    for _ in range(50 if way == "loaded" else 5):
        seconds = [float(line) for line in run_script(code, path, timeout=20).split()]
        # A wait that meets its bound has waited for something that does not end.
        assert seconds and max(seconds) < 1.5, seconds


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


FINALIZERS = """
import sys
import numpy as np
from forebay import _native

seen = []
class Owner:
    def __init__(self, session, array):
        self.session, self.array = session, array
    def __del__(self):
        # Deadlocks if the owners are dropped while their list is locked.
        seen.append(len(self.session.owned()))

model = _native.Model.open([sys.argv[1]], False)
def run(take):
    session = _native.Engine("host", {}).start(model, None)
    arrays = [np.empty(10, np.float32) for _ in range(3)]
    addresses = [array.ctypes.data for array in arrays]
    try:
        session.provide([addresses[0], 0], [Owner(session, arrays[0]), Owner(session, None)])
        raise AssertionError("a null address went through")
    except ValueError:
        pass
    # The owners of a call that failed do not stay to stand for other targets.
    assert session.owned() == [] and seen == [0, 0]
    seen.clear()
    session.provide(addresses, [Owner(session, array) for array in arrays])
    take(session)
    assert session.owned() == [] and len(seen) == 3, seen
    seen.clear()
    assert all((array == n).all() for n, array in enumerate(arrays))

def each(session):
    while session.next_ready():
        pass

run(lambda session: session.finish())
run(each)
"""


def test_finalizers_of_owners_may_use_the_session(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {f"w.{n}": torch.full((10,), float(n)) for n in range(3)}
    safetensors.torch.save_file(tensors, path)
    run_script(FINALIZERS, path, timeout=30)
