"""What our encoders write, stock torch reads: every value bit for bit, with nothing of ours installed.

Runs with whatever torch there is; README.md beside this file says how to try others.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from written import Written, bits, raw, write

pytestmark = pytest.mark.filterwarnings("ignore")

OLD = """bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128
    float8_e5m2 float8_e4m3fn""".split()
NEW = """complex32 uint16 uint32 uint64 float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float4_e2m1fn_x2
    bits8 bits16 bits1x8 bits2x4 bits4x2""".split()


def stock_does(name: str) -> bool:
    """Whether this torch can checkpoint a dtype at all: it has it, saves it, loads it and copies it."""
    try:
        content = io.BytesIO()
        torch.save(bits(getattr(torch, name), (3,), 0), content)
        content.seek(0)
        torch.empty(3, dtype=getattr(torch, name)).copy_(torch.load(content, weights_only=True))
        # What stock planning of a save calls.
        torch._utils._element_size(getattr(torch, name))
    except Exception:  # noqa: BLE001  each release refuses in a way of its own
        return False
    return True


def known(names: list[str]) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


def model_state() -> tuple[dict[str, Any], dict[str, int]]:
    """Everything that a training state has, and how it is sharded."""
    layers = {
        f"layers.{number}.weight": bits(torch.float32, (6, 5), number) for number in range(40)
    }
    # The old ones must work; a newer one where torch itself can.
    dtypes = known(OLD + [name for name in NEW if stock_does(name)])
    state: dict[str, Any] = {
        "model": {
            "embed": bits(torch.bfloat16, (301, 128), 1),
            "head": bits(torch.float32, (64, 700), 2),
            "uneven": bits(torch.float16, (3, 2, 5), 3),
            "one_row": bits(torch.float64, (1, 4), 4),
            "scalar": bits(torch.float32, (), 5),
            "empty": bits(torch.int64, (0, 7), 6),
            "empty_inside": bits(torch.int64, (3, 0, 2), 7),
            **layers,
        },
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": bits(torch.float32, (999, 33), 8)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "name": "größe/\n", "none": None}],
        },
        "steps": 2**40,
        "list": [bits(torch.uint8, (70_000,), 9), {"inner": bits(torch.int8, (3,), 10)}],
        "types": {str(dtype): bits(dtype, (4, 3), 11) for dtype in dtypes},
    }
    shards = {
        "model.embed": 0,
        "model.head": 1,
        "model.uneven": 0,
        "model.one_row": 0,
        "optim.state.0.exp_avg": 0,
        "list.0": 0,
    }
    return state, shards


def emptied(value: Any) -> Any:
    """The same structure with other values, for a load to fill."""
    if isinstance(value, torch.Tensor):
        # No `zeros`: some dtypes have no fill.
        return bits(value.dtype, tuple(value.shape), 12345)
    if isinstance(value, dict):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [emptied(inner) for inner in value]
    return "not loaded"


def assert_same(found: Any, expected: Any, place: str = "") -> None:
    assert type(found) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert raw(found) == raw(expected), place
    elif isinstance(expected, dict):
        assert {str(key) for key in found} == {str(key) for key in expected}, place
        by_text = {str(key): value for key, value in found.items()}
        for key, value in expected.items():
            assert_same(by_text[str(key)], value, f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{place}.{number}")
    else:
        assert found == expected, place


@pytest.fixture(scope="module", params=[1, 3], ids=["one_file", "three_files"])
def saved(request: Any, tmp_path_factory: Any) -> tuple[Written, dict[str, Any], dict[str, int]]:
    state, shards = model_state()
    folder = tmp_path_factory.mktemp("stock")
    return Written(folder, state, shards, files=request.param), state, shards


def items(written: Written) -> list[tuple[MetadataIndex, bytes, int]]:
    """Each item's key, its bytes cut out of the file, and where it was."""
    metadata = dcp.FileSystemReader(str(written.folder)).read_metadata()
    found = []
    for key, info in metadata.storage_data.items():
        with open(written.folder / info.relative_path, "rb") as file:
            file.seek(info.offset)
            found.append((key, file.read(info.length), info.offset))
    return found


def test_load_gives_every_value(saved: Any) -> None:
    written, state, _ = saved
    loaded = emptied(state)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(str(written.folder)))
    assert_same(loaded, state)


def test_the_nested_state_is_rebuilt_from_the_checkpoint_alone(saved: Any, tmp_path: Path) -> None:
    written, state, _ = saved
    dcp_to_torch_save(str(written.folder), str(tmp_path / "all.pt"))
    assert_same(torch.load(tmp_path / "all.pt", weights_only=False), state)


def test_a_part_can_be_loaded(saved: Any) -> None:
    written, state, _ = saved
    loaded = {"model": {"head": torch.empty(64, 700)}}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(str(written.folder)))
    assert_same(loaded["model"]["head"], state["model"]["head"])


def test_metadata_says_what_stock_metadata_says(saved: Any, tmp_path: Path) -> None:
    written, state, shards = saved
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(tmp_path / "stock")))
    stock = dcp.FileSystemReader(str(tmp_path / "stock")).read_metadata()
    ours = dcp.FileSystemReader(str(written.folder)).read_metadata()

    assert ours.planner_data == stock.planner_data
    assert list(ours.state_dict_metadata) == list(written.flat)
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
    for name, expected in stock.state_dict_metadata.items():
        found = ours.state_dict_metadata[name]
        assert type(found) is type(expected), name
        if isinstance(expected, TensorStorageMetadata):
            assert found.properties.__dict__ == expected.properties.__dict__ | sixth(found), name
            assert (type(found.size), found.size) == (torch.Size, expected.size), name
            if name not in shards:
                assert found.chunks == expected.chunks, name
    unsharded = {key for key in stock.storage_data if key.fqn not in shards}
    assert unsharded == {key for key in ours.storage_data if key.fqn not in shards}
    assert getattr(ours, "version", None) == "1.0.0"


def sixth(properties: TensorStorageMetadata) -> dict[str, Any]:
    """Newer torch keeps strides that we do not write: whatever it has in their place is right."""
    found = properties.properties.__dict__
    return {"strides": found["strides"]} if "strides" in found else {}


def test_every_chunk_is_found_where_its_index_says(saved: Any) -> None:
    written, _, _ = saved
    metadata = dcp.FileSystemReader(str(written.folder)).read_metadata()
    wanted = set()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            wanted |= {(name, chunk.offsets) for chunk in entry.chunks}
        else:
            wanted.add((name, None))
    assert {(key.fqn, key.offset) for key in metadata.storage_data} == wanted
    for key in metadata.storage_data:
        if key.offset is not None:
            chunk = metadata.state_dict_metadata[key.fqn].chunks[key.index]
            assert chunk.offsets == key.offset
            assert type(key.offset) is torch.Size
        else:
            assert key.index is None


def test_our_own_attribute_and_the_save_are_plain_values(saved: Any) -> None:
    written, _, _ = saved
    metadata = dcp.FileSystemReader(str(written.folder)).read_metadata()
    assert metadata.forebay == {"attempt": "00c0ffee-1", "version": 1}
    assert metadata.storage_meta.checkpoint_id == str(written.folder)
    assert metadata.storage_meta.save_id == "b3a1c3a4-0000-4000-8000-00c0ffee0001"


def test_each_item_is_an_archive_of_its_own_with_right_checksums(saved: Any) -> None:
    written, _, _ = saved
    for key, content, offset in items(written):
        archive = zipfile.ZipFile(io.BytesIO(content))
        assert archive.testzip() is None, key
        names = {info.filename for info in archive.infolist()}
        assert {"archive/data.pkl", "archive/byteorder", "archive/version"} <= names, key
        if key.offset is not None:
            data = archive.getinfo("archive/data/0")
            header = content[data.header_offset :][:30]
            lengths = (
                int.from_bytes(header[26:28], "little"),
                int.from_bytes(header[28:30], "little"),
            )
            assert int.from_bytes(header[14:18], "little") == data.CRC, key
            align = 4096 if data.file_size >= 65536 else 64
            start = offset + data.header_offset + 30 + sum(lengths)
            assert data.file_size == 0 or start % align == 0, key


def test_each_item_loads_alone_with_weights_only(saved: Any) -> None:
    written, _, _ = saved
    for key, content, _ in items(written):
        found = torch.load(io.BytesIO(content), weights_only=True)
        expected = written.flat[key.fqn]
        if key.offset is None:
            assert found == expected
            continue
        for dim, (start, size) in enumerate(zip(key.offset, found.shape, strict=True)):
            expected = expected.narrow(dim, start, size)
        assert_same(found, expected.contiguous(), key.fqn)
        assert found.stride() == expected.contiguous().stride()
        assert not found.requires_grad


def test_items_of_every_dtype_load_alone(tmp_path: Path) -> None:
    """Also those that this torch has but cannot checkpoint itself."""
    state = {str(dtype): bits(dtype, (5,), 1) for dtype in known(OLD + NEW)}
    for key, content, _ in items(Written(tmp_path, state)):
        assert_same(torch.load(io.BytesIO(content), weights_only=False), state[key.fqn])


def test_many_tensors_and_shards(tmp_path: Path) -> None:
    """More than the pickle's groups of a thousand, its one-byte references and its first frame hold."""
    state = {f"layer.{number:05}": bits(torch.float32, (5,), number) for number in range(2500)}
    state["cut"] = bits(torch.int32, (2600, 2), 1)
    written = Written(tmp_path, state, {"cut": 0}, ranks=1300)
    loaded = emptied(state)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(str(written.folder)))
    assert_same(loaded, state)


@pytest.mark.parametrize(
    "count", [2**32 - 2**16, 2**32 - 2, 2**32 - 1, 2**32, 9 * 2**29], ids=lambda count: hex(count)
)
def test_beyond_four_gib(tmp_path: Path, count: int) -> None:
    """Sizes and offsets of 64 bits, on either side of where they begin. The file is a hole."""
    nothing = tmp_path / "nothing.bin"
    nothing.write_bytes(b"")
    chunk = {"rank": 0, "offsets": [0], "sizes": [count]}
    entry = {"name": "t", "path": ["t"], "dtype": "uint8", "shape": [count], "chunks": [chunk]}
    write(tmp_path / "ckpt", [entry], nothing)
    (path,) = (tmp_path / "ckpt").glob("*.distcp")
    assert path.stat().st_blocks * 512 < 1 << 20

    archive = zipfile.ZipFile(path)
    data = archive.getinfo("archive/data/0")
    assert data.file_size == count
    with archive.open(data) as stream:
        assert stream.read(1000) == bytes(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.load(str(path), mmap=True, weights_only=True)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, (count,))
    assert tensor[:10].tolist() == tensor[-10:].tolist() == [0] * 10
    info = next(iter(dcp.FileSystemReader(str(path.parent)).read_metadata().storage_data.values()))
    assert (info.offset, info.length) == (0, path.stat().st_size)


@pytest.mark.slow
def test_the_checksum_beyond_four_gib(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.bin"
    nothing.write_bytes(b"")
    chunk = {"rank": 0, "offsets": [0], "sizes": [2**32 + 4097]}
    shape = chunk["sizes"]
    entry = {"name": "t", "path": ["t"], "dtype": "uint8", "shape": shape, "chunks": [chunk]}
    write(tmp_path / "ckpt", [entry], nothing)
    (path,) = (tmp_path / "ckpt").glob("*.distcp")
    assert zipfile.ZipFile(path).testzip() is None
