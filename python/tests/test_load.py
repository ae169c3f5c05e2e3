"""load_file: dtypes, names, regions, casts, checksums, reports."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from support import TORCH, random_tensor, raw, run_script, same, write_unaligned

import forebay


@pytest.fixture
def everything(tmp_path: Path) -> Path:
    """A tensor of every dtype that torch has, in shapes with and without elements."""
    tensors = {}
    for number, (name, dtype) in enumerate(TORCH.items()):
        tensors[name] = random_tensor(dtype, (5, 3, 4), number)
        tensors[f"{name}.flat"] = random_tensor(dtype, (7,), number + 100)
        tensors[f"{name}.none"] = random_tensor(dtype, (0, 4), number)
        if name != "F4":
            tensors[f"{name}.scalar"] = random_tensor(dtype, (), number + 200)
    path = tmp_path / "everything.safetensors"
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return path


def test_every_dtype_as_the_library_reads_it(everything: Path) -> None:
    expected = safetensors.torch.load_file(everything)
    found = forebay.load_file(everything)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert same(found[name], tensor), name
        assert found[name].is_contiguous()
        assert found[name].data_ptr() % 16 == 0 or not found[name].numel()
    again = everything.parent / "again.safetensors"
    forebay.save_file(found, again, {"format": "pt"})
    assert again.read_bytes() == everything.read_bytes()


def test_unaligned_files(tmp_path: Path) -> None:
    for start in range(8):
        tensors = {
            "odd": random_tensor(torch.uint8, (3,), 1),
            "f32": random_tensor(torch.float32, (33, 65), 2),
            "f64": random_tensor(torch.float64, (7,), 3),
            "f4": random_tensor(torch.float4_e2m1fn_x2, (3, 5), 4),
        }
        path = tmp_path / f"{start}.safetensors"
        write_unaligned(path, tensors, start)
        for name, tensor in forebay.load_file(path).items():
            assert same(tensor, tensors[name])


def test_numpy_as_the_library_reads_it(tmp_path: Path) -> None:
    kinds = "f8 f4 f2 i8 u8 i4 u4 i2 u2 i1 u1 ? c8".split()
    arrays = {
        kind: np.frombuffer(raw(random_tensor(torch.bool, (64,), 1)), kind).copy() for kind in kinds
    }
    path = tmp_path / "arrays.safetensors"
    safetensors.numpy.save_file(arrays, path)
    found = forebay.load_file(path, "host")
    for kind, array in safetensors.numpy.load_file(path).items():
        assert found[kind].dtype == array.dtype
        assert found[kind].tobytes() == array.tobytes()
        assert found[kind].flags.writeable and found[kind].flags.owndata


def test_what_numpy_lacks(everything: Path) -> None:
    with pytest.raises(forebay.UnsupportedError, match="(?s)numpy has no dtype for .*raw=True"):
        forebay.load_file(everything, "host", names="F4")
    found = forebay.load_file(everything, "host", raw=True, names="F*")
    assert found["F4"].dtype == np.uint8 and found["F4"].shape == (5, 3, 4)
    pytest.importorskip("torch")
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(forebay.UnsupportedError, match="ml_dtypes"):
            forebay.load_file(everything, "host", names=["BF16"])
        bits = forebay.load_file(everything, "host", names=["BF16"], raw=True)["BF16"]
        assert bits.dtype == np.uint16
    else:
        found = forebay.load_file(everything, "host", names=["BF16"])
        assert found["BF16"].dtype == ml_dtypes.bfloat16
    cast = forebay.load_file(everything, "host", names=["BF16"], dtype="float32")["BF16"]
    expected = safetensors.torch.load_file(everything)["BF16"].float().numpy()
    assert np.array_equal(cast, expected, equal_nan=True)


def test_what_torch_lacks(tmp_path: Path) -> None:
    path = tmp_path / "f6.safetensors"
    text = b'{"w":{"dtype":"F6_E2M3","shape":[2,8],"data_offsets":[0,12]}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(range(12)))
    with pytest.raises(forebay.UnsupportedError) as caught:
        forebay.load_file(path)
    assert caught.value.code == "unsupported" and "F6_E2M3" in str(caught.value)
    assert "`w`" in str(caught.value)
    found = forebay.load_file(path, raw=True)["w"]
    assert found.dtype == torch.uint8 and found.shape == (2, 6)
    assert raw(found) == bytes(range(12))


def test_names(everything: Path) -> None:
    expected = safetensors.torch.load_file(everything)
    chosen = forebay.load_file(everything, names=["F32", "BF16.*", "I64"])
    assert set(chosen) == {"F32", "BF16.flat", "BF16.none", "BF16.scalar", "I64"}
    for name, tensor in chosen.items():
        assert same(tensor, expected[name])
    assert set(forebay.load_file(everything, names=lambda name: name.endswith("none"))) == {
        name for name in expected if name.endswith("none")
    }
    assert forebay.load_file(everything, names=[]) == {}
    for bad in (["F33"], ["F32", "nothing*"]):
        with pytest.raises(KeyError) as caught:
            forebay.load_file(everything, names=bad)
        assert caught.value.code == "no_such_tensor"
    assert "F32" in str(caught.value.hints) or caught.value.hints


def test_regions_and_shards(tmp_path: Path) -> None:
    tensors = {
        "rows": random_tensor(torch.bfloat16, (10, 6), 1),
        "cube": random_tensor(torch.float32, (4, 5, 6), 2),
        "line": random_tensor(torch.int64, (5,), 3),
        "one": random_tensor(torch.float64, (), 4),
    }
    path = tmp_path / "m.safetensors"
    write_unaligned(path, tensors, 3)
    found = forebay.load_file(
        path,
        regions={"rows": slice(2, 5), "cube": (..., slice(-3, -1)), "line": slice(4, 2)},
    )
    assert same(found["rows"], tensors["rows"][2:5])
    assert same(found["cube"], tensors["cube"][..., -3:-1])
    assert same(found["line"], tensors["line"][4:2])
    assert same(found["one"], tensors["one"])
    for world in (1, 2, 3, 7):
        parts = [forebay.load_file(path, shard=(1, rank, world)) for rank in range(world)]
        for name in ("rows", "cube"):
            assert same(torch.cat([part[name] for part in parts], 1), tensors[name])
            chunks = torch.chunk(tensors[name], world, 1)
            for part, chunk in zip(parts, chunks, strict=False):
                assert same(part[name], chunk)
        assert all(same(part["line"], tensors["line"]) for part in parts)
        last = [
            forebay.load_file(path, names=["cube"], shard=(-1, rank, world))
            for rank in range(world)
        ]
        assert same(torch.cat([part["cube"] for part in last], -1), tensors["cube"])

    def choose(name: str, shape: tuple[int, ...]) -> object:
        return {"rows": (0, 1, 2), "cube": (slice(1, 2), slice(None, 3))}.get(name)

    found = forebay.load_file(path, shard=choose)
    assert same(found["rows"], tensors["rows"][5:])
    assert same(found["cube"], tensors["cube"][1:2, :3])
    for bad in (slice(0, 4, 2), (0,), (slice(0, 1),) * 3, (..., ...)):
        with pytest.raises(IndexError) as caught:
            forebay.load_file(path, regions={"rows": bad})
        assert caught.value.code == "bad_slice" and "`rows`" in str(caught.value)
    with pytest.raises(forebay.NoSuchTensorError):
        forebay.load_file(path, regions={"row": slice(0, 1)})
    with pytest.raises(forebay.UsageError):
        forebay.load_file(path, shard=(0, 2, 2))


def test_regions_of_f4_count_elements(tmp_path: Path) -> None:
    tensor = random_tensor(torch.float4_e2m1fn_x2, (6, 4), 1)
    path = tmp_path / "f4.safetensors"
    write_unaligned(path, {"w": tensor})
    bits = tensor.view(torch.uint8)
    found = forebay.load_file(path, regions={"w": (slice(1, 3), slice(2, 8))})["w"]
    assert found.dtype == tensor.dtype
    assert torch.equal(found.view(torch.uint8), bits[1:3, 1:4])
    with pytest.raises(forebay.Error) as caught:
        forebay.load_file(path, regions={"w": (slice(0, 3), slice(1, 8))})
    assert caught.value.code in ("misaligned", "unsupported")


def test_casts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        "f32": torch.randn(300, 400),
        "bf16": torch.randn(1000, 7).bfloat16(),
        "f8": torch.randn(64, 64).to(torch.float8_e4m3fn),
        "ids": torch.arange(9),
        "none": torch.zeros(0, 3),
    }
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, path)
    # A window that holds one of them at a time.
    monkeypatch.setattr("forebay._load.CAST_WINDOW_BYTES", 16 << 10)
    for dtype in (torch.bfloat16, torch.float64, "float16", "F32"):
        found = forebay.load_file(path, dtype=dtype)
        real = {"float16": torch.float16, "F32": torch.float32}.get(dtype, dtype)
        assert list(found) == list(safetensors.torch.load_file(path))
        for name, tensor in tensors.items():
            expected = tensor if name == "ids" else tensor.to(real)
            assert same(found[name], expected), (name, dtype)
        assert forebay.last_report()["cast_tensors"] == 4
    with pytest.raises(forebay.UsageError):
        forebay.load_file(path, dtype="float3")


def test_casts_take_little_memory(tmp_path: Path) -> None:
    """512 MiB of F32 to BF16: the peak is the 256 MiB that stay, the window of 64 MiB, and little else."""
    code = """
import resource, sys, torch, forebay, forebay._load
forebay._load.CAST_WINDOW_BYTES = 64 << 20
forebay.load_file(sys.argv[1], names=["w.0"], dtype="bfloat16")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = forebay.load_file(sys.argv[1], dtype="bfloat16")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(found) == 64
print((after - before) >> 10)
"""
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({f"w.{n}": torch.ones(2 << 20) for n in range(64)}, path)
    grown = int(run_script(code, path))
    assert grown < 256 + 64 + 48, grown


def test_expected_checksums(tmp_path: Path) -> None:
    tensors = {f"w.{n}": torch.randn(1000, n + 1) for n in range(20)}
    single = tmp_path / "m.safetensors"
    safetensors.torch.save_file(tensors, single)
    right = hashlib.sha256(single.read_bytes()).hexdigest()
    wrong = "0" * 64
    assert len(forebay.load_file(single, expect_sha256=right.upper())) == 20
    report = forebay.last_report()
    assert any("SHA-256" in line for line in report["verified"]) and not report["not_verified"]
    with pytest.raises(forebay.ChecksumError) as caught:
        forebay.load_file(single, expect_sha256=wrong)
    assert caught.value.code == "checksum" and right in str(caught.value)
    folder = tmp_path / "sharded"
    files = forebay.save_sharded(tensors, folder, "100KB")
    assert len(files) > 2
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}
    assert len(forebay.load_file(folder, expect_sha256=digests)) == 20
    with pytest.raises(forebay.ChecksumError, match=files[1]):
        forebay.load_file(folder, expect_sha256=digests | {files[1]: wrong})
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with pytest.raises(forebay.ChecksumError):
        forebay.load_file(folder, into=target, expect_sha256=digests | {files[1]: wrong})
    assert not any(tensor.any() for tensor in target.values())
    for bad in (right, "xyz", {"other.safetensors": right}, {files[0]: "12"}):
        with pytest.raises(forebay.UsageError):
            forebay.load_file(folder, expect_sha256=bad)


def test_places(tmp_path: Path) -> None:
    tensors = {f"w.{n}": torch.randn(100, 10) for n in range(8)}
    folder = tmp_path / "model"
    files = forebay.save_sharded(tensors, folder, 10_000)
    assert len(files) > 1
    paths = [folder / name for name in files]
    for place in (folder, str(folder), folder / "model.safetensors.index.json", paths, iter(paths)):
        found = forebay.load_file(place)
        assert set(found) == set(tensors)
        assert all(same(found[name], tensors[name]) for name in tensors)
    for bad in (b"x", 3, None, []):
        with pytest.raises(forebay.UsageError):
            forebay.load_file(bad)


def test_options_and_devices(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1000, 1000)}, path)
    for way in ("auto", "copy", "direct", "buffered", "fallback"):
        for cache in ("auto", "keep", "bypass"):
            options = {"path": way, "cache": cache, "threads": 2, "arena_bytes": 64 << 20}
            assert forebay.load_file(path, options=options)["w"].sum() == 1e6
    report = forebay.last_report()
    assert report["threads"] == 2
    assert isinstance(forebay.load_file(path, torch.device("cpu"))["w"], torch.Tensor)
    assert isinstance(forebay.load_file(path, "host")["w"], np.ndarray)
    bad_options = ({"path": "x"}, {"cache": "x"}, {"threads": 0}, {"thread": 1}, {"path": 3})
    for options in bad_options:
        with pytest.raises(forebay.UsageError):
            forebay.load_file(path, options=options)
    for device in ("gpu", "cuda:x", "meta", True, 1.5, None):
        with pytest.raises(forebay.UsageError):
            forebay.load_file(path, device)
    if not torch.cuda.is_available():
        with pytest.raises(forebay.DeviceError) as caught:
            forebay.load_file(path, "cuda:0")
        assert caught.value.code == "no_device"


def test_reports_and_progress(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1 << 20), "v": torch.ones(3)}, path)
    told: list[tuple[int, int]] = []
    forebay.load_file(path, progress=lambda done, total: told.append((done, total)))
    report = forebay.last_report()
    size = (4 << 20) + 12
    assert told[-1] == (size, size)
    assert report["bytes"] == size and report["tensors"] == 2 and report["seconds"] > 0
    assert sum(share["bytes"] for share in report["paths"].values()) == size
    assert report["total_seconds"] >= report["seconds"]
    assert report["device"] == "host" and report["framework"] == "torch"
    assert report["files_unchanged"] == 1 and report["not_verified"]

    def fail(done: int, total: int) -> None:
        raise LookupError("no more")

    with pytest.raises(LookupError):
        forebay.load_file(path, progress=fail)


def test_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(10), "b": torch.ones(4).bfloat16()}, path)
    code = """
import sys
import forebay
assert "torch" not in sys.modules and "numpy" not in sys.modules
found = forebay.load_file(sys.argv[1], "host", names=["w"])
assert "torch" not in sys.modules
sys.modules["torch"] = None
for device in ("cpu", "host"):
    found = forebay.load_file(sys.argv[1], device, raw=True)
    assert type(found["w"]).__name__ == "ndarray" and found["w"].sum() == 10
with forebay.safe_open(sys.argv[1], "np") as model:
    assert model.get_slice("w")[2:4].tolist() == [1, 1]
    assert model.get_tensor("w").sum() == 10
try:
    forebay.safe_open(sys.argv[1], "pt")
except forebay.UnsupportedError:
    pass
else:
    raise SystemExit("must fail")
forebay.save_file({"w": found["w"]}, sys.argv[1] + ".copy")
assert forebay.load_file(sys.argv[1] + ".copy", "host")["w"].sum() == 10
"""
    run_script(code, path)


def test_outputs_outlive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensor = torch.randn(1 << 18)
    safetensors.torch.save_file({"w": tensor}, path)
    found = forebay.load_file(path)["w"]
    with open(path, "r+b") as file:
        file.truncate(0)
    assert same(found, tensor)
    assert found.untyped_storage().nbytes() == tensor.numel() * 4


def test_memory_is_released(tmp_path: Path) -> None:
    from forebay import _options

    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1 << 20)}, path)
    forebay.load_file(path)
    assert _options._engines
    forebay.release_memory()
    assert not _options._engines
    assert forebay.load_file(path)["w"].sum() == 1 << 20


def test_regions_are_loaded_beside_the_names(tmp_path: Path) -> None:
    tensors = {name: torch.arange(12.0).reshape(4, 3) for name in ("a", "b", "c")}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    found = forebay.load_file(tmp_path, names="a", regions={"b": slice(1, 3)})
    assert set(found) == {"a", "b"}
    assert torch.equal(found["b"], tensors["b"][1:3])


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, "int32"])
def test_floats_are_not_cast_to_integers(tmp_path: Path, dtype: object) -> None:
    safetensors.torch.save_file({"a": torch.randn(4)}, tmp_path / "m.safetensors")
    with pytest.raises(forebay.UsageError, match="cannot be cast"):
        forebay.load_file(tmp_path, dtype=dtype)
    into = {"a": torch.zeros(4, dtype=torch.int8)}
    with pytest.raises(forebay.Error) as caught:
        forebay.load_file(tmp_path, into=into, dtype="target")
    assert caught.value.code == "dtype_mismatch" and not into["a"].any()


@pytest.mark.parametrize(
    "options", [[1], "x", 5, {5: 1}, {"pth": "copy"}, {"arena_bytes": True}, {"arena_bytes": 2**64}]
)
def test_odd_options_are_usage_errors(tmp_path: Path, options: Any) -> None:
    safetensors.torch.save_file({"a": torch.randn(4)}, tmp_path / "m.safetensors")
    with pytest.raises(forebay.UsageError):
        forebay.load_file(tmp_path, options=options)
    with pytest.raises(forebay.UsageError, match="from 1 to 256"):
        forebay.load_file(tmp_path, threads=10**9)
