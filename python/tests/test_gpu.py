"""On a GPU: what is loaded, what memory it takes, streams, captures, contexts."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from support import TORCH, random_tensor, raw, run_script, same, write_unaligned
from torch import nn

import forebay

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    made = {
        f"{name}.{number}": random_tensor(dtype, shape, number)
        for name, dtype in TORCH.items()
        for number, shape in enumerate([(300, 404), (7, 2), (0, 4), (2, 3, 50)])
    }
    made["big"] = random_tensor(torch.bfloat16, (8192, 8192), 1)
    made |= {f"small.{n}": random_tensor(torch.float32, (n + 1, 3), n) for n in range(300)}
    return made


@pytest.fixture(scope="module")
def model(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu") / "m.safetensors"
    write_unaligned(path, tensors, 3)
    return path


@pytest.mark.parametrize("way", ["auto", "dma", "copy", "direct", "buffered", "fallback"])
def test_every_path(model: Path, tensors: dict[str, torch.Tensor], way: str) -> None:
    found = forebay.load_file(model, "cuda", options={"path": way})
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].is_cuda and same(found[name].cpu(), tensor), name
        assert found[name].data_ptr() % 256 == 0 or not found[name].numel()
        assert found[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    report = forebay.last_report()
    assert report["device"] == "cuda:0"
    assert report["arena_peak_bytes"] <= report["arena_limit_bytes"]
    assert report["registered_peak_bytes"] <= report["registered_limit_bytes"]


def test_devices(model: Path) -> None:
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
        found = forebay.load_file(model, device, names=["small.1"])["small.1"]
        assert found.device == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(forebay.DeviceError):
        forebay.load_file(model, f"cuda:{torch.cuda.device_count()}")


def test_slices_and_iteration(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    with forebay.safe_open(model, device="cuda") as opened:
        big = opened.get_slice("big")
        for index in (
            (slice(10, 4000), slice(100, 228)),
            (slice(None), slice(4096, None)),
            slice(5, 6),
            (..., 17),
            slice(0, None, 1024),
            [5, 8191, 5],
        ):
            assert same(big[index].cpu(), tensors["big"][index].contiguous()), index
        assert same(opened.get_tensor("small.7").cpu(), tensors["small.7"])
        for budget in (1, 16 * MIB, 1 << 30):
            found = {name: raw(tensor) for name, tensor in opened.iter_tensors(max_bytes=budget)}
            assert found == {name: raw(tensor) for name, tensor in tensors.items()}
    parts = [
        forebay.load_file(model, "cuda", names="big", shard=(1, r, 3))["big"] for r in range(3)
    ]
    assert same(torch.cat(parts, 1).cpu(), tensors["big"])


MEMORY = """
import sys, torch, forebay
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
names = sys.argv[2].split(",")
forebay.load_file(sys.argv[1], "cuda", names=names[:1])
torch.cuda.empty_cache()
torch.cuda.synchronize()
free, _ = torch.cuda.mem_get_info()
allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
found = forebay.load_file(sys.argv[1], "cuda", names=names)
size = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in found.values())
assert torch.cuda.memory_allocated() - allocated == size
assert torch.cuda.max_memory_allocated() - allocated == size
taken = torch.cuda.memory_reserved() - reserved
now, _ = torch.cuda.mem_get_info()
print(size, taken, free - now)
assert free - now <= taken, "device memory beyond the allocator's"
"""


def test_no_device_memory_beyond_the_outputs(model: Path) -> None:
    run_script(MEMORY, model, "big,F32.0,small.1,small.2")


CAST = """
import sys, torch, forebay, forebay._load
forebay._load.CAST_WINDOW_BYTES = 32 << 20
torch.zeros(1, device="cuda")
before = torch.cuda.memory_allocated()
found = forebay.load_file(sys.argv[1], "cuda", names=["w.*"], dtype=torch.bfloat16)
size = sum(t.numel() * 2 for t in found.values())
peak = torch.cuda.max_memory_allocated() - before
assert peak <= size + (32 << 20) + (12 << 20), (peak, size)
for n, (name, tensor) in enumerate(sorted(found.items())):
    assert tensor.dtype == torch.bfloat16 and (tensor == int(name[2:])).all()
"""


def test_casts_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(
        {f"w.{n}": torch.full((2 * MIB,), float(n)) for n in range(64)}, path
    )
    run_script(CAST, path)


def test_side_streams(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Memory that a busy stream still writes to is not filled before the stream is done with it."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            stale = [torch.empty_like(tensors["big"], device="cuda") for _ in range(2)]
            torch.cuda._sleep(200_000_000)
            for tensor in stale:
                tensor.fill_(3)
            del stale, tensor
            found = forebay.load_file(model, "cuda", names=["big"])["big"]
            assert same(found.cpu(), tensors["big"])
    # Complete when handed over, whatever stream looks.
    found = forebay.load_file(model, "cuda", names=["big"])["big"]
    with torch.cuda.stream(torch.cuda.Stream()):
        assert same(found.cpu(), tensors["big"])


def test_a_capture_in_another_thread(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    forebay.load_file(model, "cuda", names=["big"])
    failures: list[BaseException] = []
    over = threading.Event()
    loads = 0

    def load() -> None:
        nonlocal loads
        try:
            into = {"big": torch.empty(8192, 8192, dtype=torch.bfloat16, device="cuda")}
            started.set()
            while not over.is_set():
                forebay.load_file(model, names=["big"], into=into)
                loads += 1
            assert same(into["big"].cpu(), tensors["big"])
        except BaseException as error:
            failures.append(error)
            started.set()

    started = threading.Event()
    weight = torch.ones(512, 512, device="cuda")
    weight @ weight
    torch.cuda.synchronize()
    thread = threading.Thread(target=load)
    thread.start()
    started.wait()
    try:
        for _ in range(20):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = weight
                for _ in range(50):
                    out = out @ weight / 512
            graph.replay()
            torch.cuda.current_stream().synchronize()
            assert torch.allclose(out, weight)
    finally:
        over.set()
        thread.join()
    assert not failures and loads > 0


ONE_DEVICE = """
import sys, subprocess, os, torch, forebay
number = int(sys.argv[2])
found = forebay.load_file(sys.argv[1], f"cuda:{number}", names=["small.1"])["small.1"]
assert found.device.index == number
for other in range(torch.cuda.device_count()):
    assert torch._C._cuda_hasPrimaryContext(other) == (other == number), other
"""


def test_only_the_named_device_is_touched(model: Path) -> None:
    for number in range(min(torch.cuda.device_count(), 2)):
        run_script(ONE_DEVICE, model, number)


def test_the_child_of_a_fork(model: Path) -> None:
    code = """
import os, sys, forebay
forebay.load_file(sys.argv[1], "cuda", names=["small.1"])
child = os.fork()
if child == 0:
    status = 1
    try:
        forebay.load_file(sys.argv[1], "cuda", names=["small.1"])
    except forebay.ForkedError:
        assert forebay.load_file(sys.argv[1], "host", names=["small.1"])
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
forebay.load_file(sys.argv[1], "cuda", names=["small.1"])
"""
    run_script(code, model)


def test_modules(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    net[2].weight = net[0].weight
    path = tmp_path / "m.safetensors"
    forebay.save_model(net, path)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    other[2].weight = other[0].weight
    forebay.load_file(path, "cuda", into=other)
    assert other[2].weight is other[0].weight
    assert all(same(t.cpu(), net.state_dict()[name]) for name, t in other.state_dict().items())
    # Existing memory is filled where it is, on the GPU and on the host.
    mixed = nn.Sequential(nn.Linear(64, 64).cuda(), nn.BatchNorm1d(64), nn.Linear(64, 64).cuda())
    mixed[2].weight = mixed[0].weight
    forebay.load_file(path, into=mixed)
    assert mixed[0].weight.is_cuda and not mixed[1].weight.is_cuda
    assert all(same(t.cpu(), net.state_dict()[name]) for name, t in mixed.state_dict().items())


def test_saving(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    here = {name: tensor for name, tensor in tensors.items() if name.endswith((".0", ".1"))}
    there = {name: tensor.cuda() for name, tensor in here.items()}
    forebay.save_file(there, tmp_path / "gpu")
    forebay.save_file(here, tmp_path / "host")
    assert (tmp_path / "gpu").read_bytes() == (tmp_path / "host").read_bytes()


def test_a_hundred_loads_leave_nothing(model: Path) -> None:
    forebay.load_file(model, "cuda")
    torch.cuda.empty_cache()
    free, files = torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        forebay.load_file(model, "cuda", names="small.*")
    forebay.load_file(model, "cuda")
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    assert free - torch.cuda.mem_get_info()[0] <= 4 * MIB
    assert len(os.listdir("/proc/self/fd")) <= files + 2
