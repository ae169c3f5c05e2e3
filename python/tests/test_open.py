"""safe_open: names, tensors, slices, arrival order."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices, integer_array_indices
from support import random_tensor, raw, same, write_sparse, write_unaligned

import forebay

SHAPES = {
    "matrix": (64, 129),
    "cube": (7, 5, 6),
    "long": (3000, 5),
    "wide": (3, 5000),
    "rows": (40, 3000),
    "deep": (2, 3, 1, 4, 2),
    "line": (9,),
    "one": (1, 1),
    "scalar": (),
    "none": (0, 4),
    "nothing": (3, 0, 2),
}
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors whose data starts at an odd byte."""
    tensors = {
        f"{name}.{str(dtype).removeprefix('torch.')}": random_tensor(dtype, shape, number)
        for number, (name, shape) in enumerate(SHAPES.items())
        for dtype in DTYPES
    }
    path = tmp_path_factory.mktemp("open") / "m.safetensors"
    write_unaligned(path, tensors, 5)
    return path


@pytest.fixture(scope="module")
def whole(model: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(model)


@pytest.fixture(scope="module")
def opened(model: Path) -> Iterator[forebay.SafeOpen]:
    with forebay.safe_open(model) as handle:
        yield handle


@pytest.fixture(scope="module")
def arrays(model: Path) -> Iterator[forebay.SafeOpen]:
    with forebay.safe_open(model, framework="np") as handle:
        yield handle


def check(piece: forebay.TensorSlice, tensor: Any, index: Any) -> None:
    """The slice gives what the tensor gives, or raises what it raises."""
    try:
        expected = tensor[index]
    except Exception as error:
        with pytest.raises(type(error)) as caught:
            piece[index]
        assert str(caught.value) == str(error)
        return
    found = piece[index]
    if isinstance(tensor, torch.Tensor):
        assert same(found, expected), index
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size()
    else:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert found.tobytes() == expected.tobytes() and found.flags.c_contiguous


def any_index(shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    """Indices that fit, indices that do not, lists of rows."""
    number = st.integers(-12, 12)
    cut = st.builds(
        slice, st.none() | number, st.none() | number, st.none() | st.sampled_from([1, 2, 3, 7, -1])
    )
    item = st.one_of(number, cut, st.just(...), st.none())
    rows = (
        st.lists(st.integers(-shape[0], shape[0] - 1), max_size=6) if shape and shape[0] else None
    )
    options = [
        basic_indices(shape, allow_newaxis=True, allow_ellipsis=True),
        item,
        st.lists(item, max_size=len(shape) + 2)
        .map(tuple)
        .filter(lambda items: items.count(...) < 2),
    ]
    if rows is not None:
        options += [rows.map(lambda rows: (rows,)), rows.map(np.array).map(lambda a: a.astype(int))]
    if 0 not in shape and shape:
        options.append(integer_array_indices(shape))
    return st.one_of(options)


RELAXED = settings(
    max_examples=5000 if os.environ.get("FOREBAY_FULL") == "1" else 400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@RELAXED
@given(st.data())
def test_slices_are_those_of_torch(
    opened: forebay.SafeOpen, whole: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(whole)))
    index = data.draw(any_index(tuple(whole[name].shape)))
    check(opened.get_slice(name), whole[name], index)


@RELAXED
@given(st.data())
def test_slices_are_those_of_numpy(
    arrays: forebay.SafeOpen, whole: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(n for n in whole if "bfloat16" not in n)))
    index = data.draw(any_index(tuple(whole[name].shape)))
    check(arrays.get_slice(name), whole[name].numpy(), index)


@RELAXED
@given(st.data())
def test_regions_are_those_of_torch(
    model: Path, whole: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(whole)), min_size=1, max_size=4, unique=True))
    bound = st.none() | st.integers(-70, 70)
    regions = {}
    for name in names:
        count = data.draw(st.integers(0, whole[name].dim()))
        cuts = st.tuples(*[st.builds(slice, bound, bound)] * count)
        regions[name] = data.draw(cuts)
    found = forebay.load_file(model, names=names, regions=regions)
    for name in names:
        assert same(found[name], whole[name][regions[name]].contiguous())


CASES: list[Any] = [
    0, -1, 2, -3, ..., None, slice(None), slice(0, 3, 3), slice(None, None, -1), [0, 1], [-1], [5],
    (), (0, 0, 0, 0), (..., 0), (0, ..., 1), True, slice(1, 1), slice(2, 1), slice(5, 100),
    slice(-100, 1), (None, 0), np.int64(1), 1.0, "a", (..., None), slice(-1, None), (slice(None), 1),
    (0, 0, 0, ...), ([0, 1], [0, 1]), torch.tensor([True, False]), torch.tensor(1), slice(0, 1, 0),
    (slice(None), slice(None, None, 2)), torch.tensor([1, 0]), (slice(None), [0, 2]), [],
]  # fmt: skip


@pytest.mark.parametrize("index", CASES, ids=repr)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_slices_are_those_of_the_library(tmp_path: Path, index: Any) -> None:
    path = tmp_path / "m.safetensors"
    safetensors.torch.save_file({"t": torch.arange(24.0).reshape(2, 3, 4)}, path)
    with safetensors.safe_open(path, "pt") as library, forebay.safe_open(path) as ours:
        assert ours.get_slice("t").get_shape() == library.get_slice("t").get_shape()
        assert ours.get_slice("t").get_dtype() == library.get_slice("t").get_dtype()
        try:
            expected = library.get_slice("t")[index]
        except Exception as error:
            with pytest.raises(type(error)) as caught:
                ours.get_slice("t")[index]
            assert str(caught.value) == str(error)
            return
        assert same(ours.get_slice("t")[index], expected.contiguous())


def test_a_slice_reads_only_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_sparse(path, {"before": 12345, "w": 1 << 30})
    with forebay.safe_open(path) as model:
        for index, most in (
            (slice(1000, 2000), 1000),
            (7, 1),
            (slice(0, None, 1 << 20), 1024),
            (slice(100, 200, 2), 99),
            ([5, 1 << 29, (1 << 30) - 1], 3),
        ):
            model.get_slice("w")[index]
            assert forebay.last_report()["read_bytes"] <= most, index


def test_what_the_library_has(model: Path, whole: dict[str, torch.Tensor]) -> None:
    with safetensors.safe_open(model, "pt") as library, forebay.safe_open(str(model)) as ours:
        assert ours.keys() == library.keys()
        # Where tensors without elements lie at one place, the library's order is chance.
        some = [name for name in ours.offset_keys() if whole[name].numel()]
        assert some == [name for name in library.offset_keys() if whole[name].numel()]
        assert ours.metadata() == library.metadata() is None
        assert list(ours.get_tensors()) == ours.offset_keys()
        for name in ours.keys():
            assert same(ours.get_tensor(name), whole[name])
            assert ours.get_slice(name).get_shape() == library.get_slice(name).get_shape()
        with pytest.raises(KeyError) as caught:
            ours.get_tensor("matrix.float3")
        assert "matrix.float32" in str(caught.value)
        kept = ours.get_tensor("rows.float32")
        piece = ours.get_slice("cube.uint8")
    assert same(kept, whole["rows.float32"])
    for use in (
        ours.keys,
        ours.offset_keys,
        ours.metadata,
        ours.get_tensors,
        lambda: ours.get_tensor("rows.float32"),
        lambda: ours.get_slice("rows.float32"),
        lambda: piece[0],
        piece.get_shape,
        lambda: next(ours.iter_tensors()),
        ours.__enter__,
    ):
        with pytest.raises(forebay.UsageError, match="closed"):
            use()
    for bad in ("tf", None, 3):
        with pytest.raises(forebay.UsageError):
            forebay.safe_open(model, framework=bad)


def test_f4_slices(tmp_path: Path) -> None:
    tensor = random_tensor(torch.float4_e2m1fn_x2, (6, 4), 1)
    bits = tensor.view(torch.uint8)
    path = tmp_path / "f4.safetensors"
    write_unaligned(path, {"w": tensor})
    with forebay.safe_open(path) as model:
        piece = model.get_slice("w")
        assert piece.get_shape() == [6, 8]
        assert torch.equal(piece[2:4].view(torch.uint8), bits[2:4])
        assert torch.equal(piece[::2, 2:6].view(torch.uint8), bits[::2, 1:3])
        assert torch.equal(piece[[4, 0]].view(torch.uint8), bits[[4, 0]])
        assert torch.equal(piece[-1].view(torch.uint8), bits[-1])
        for index in ((slice(None), 1), (0, slice(None, None, 2)), ([0], [1])):
            with pytest.raises(forebay.UnsupportedError):
                piece[index]
        with pytest.raises(forebay.Error):
            piece[:, 1:3]


def test_iteration_gives_everything_once(tmp_path: Path) -> None:
    tensors = {f"w.{n:03}": torch.randn(n * 37 + 1, 11) for n in range(120)}
    tensors["big"] = torch.randn(3 << 20)
    tensors["none"] = torch.zeros(0)
    folder = tmp_path / "m"
    forebay.save_sharded(tensors, folder, "3MB")
    with forebay.safe_open(folder) as model:
        for budget in (1, 1000, 1 << 20, 1 << 30):
            found = list(model.iter_tensors(max_bytes=budget))
            assert len(found) == len(tensors)
            assert all(same(tensor, tensors[name]) for name, tensor in found)
        chosen = dict(model.iter_tensors(names="w.00*"))
        assert set(chosen) == {f"w.00{n}" for n in range(10)}
        for bad in (0, -1, 1.5, None):
            with pytest.raises(forebay.UsageError):
                model.iter_tensors(max_bytes=bad)


def test_iteration_bounds_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live bytes, counted where memory is made and let go, stay within the budget, one piece and one tensor."""
    import weakref

    from forebay._frameworks import Torch

    sizes = {f"w.{n}": 300_000 + n * 1000 for n in range(200)} | {"big": 40 << 20}
    path = tmp_path / "m.safetensors"
    write_sparse(path, sizes)
    live = peak = 0

    def gone(size: int) -> None:
        nonlocal live
        live -= size

    make = Torch.empty_many

    def counted(self: Torch, shapes: Any, dtypes: Any) -> Any:
        nonlocal live, peak
        tensors, addresses = make(self, shapes, dtypes)
        for tensor in tensors:
            weakref.finalize(tensor, gone, tensor.numel())
            live += tensor.numel()
        peak = max(peak, live)
        return tensors, addresses

    monkeypatch.setattr(Torch, "empty_many", counted)
    budget = 8 << 20
    with forebay.safe_open(path) as model:
        seen = 0
        for _, tensor in model.iter_tensors(names="w.*", max_bytes=budget):
            seen += tensor.numel()
            del tensor
        assert seen == sum(sizes.values()) - sizes["big"]
        gc.collect()
        assert live == 0
        assert peak <= budget, peak
        assert peak > budget // 2
        peak = 0
        assert sum(1 for _ in model.iter_tensors(max_bytes=budget)) == len(sizes)
        assert peak <= max(budget, sizes["big"]) + budget, peak


def test_leaving_early_cancels(tmp_path: Path) -> None:
    import threading

    path = tmp_path / "m.safetensors"
    write_sparse(path, {f"w.{n}": 8 << 20 for n in range(100)})
    with forebay.safe_open(path) as model:
        for _ in range(20):
            arriving = model.iter_tensors(max_bytes=32 << 20)
            name, tensor = next(arriving)
            arriving.close()
            assert tensor.numel() == 8 << 20
        for _ in model.iter_tensors():
            break
        arriving = model.iter_tensors(max_bytes=16 << 20)
        next(arriving)
    with pytest.raises(forebay.UsageError, match="closed"):
        for _ in arriving:
            pass
    assert threading.active_count() < 20


def test_many_sizes_of_one_read(tmp_path: Path) -> None:
    """Small and large whole tensors, on and off the page cache's quick way."""
    tensors = {
        str(size): random_tensor(torch.uint8, (size,), size)
        for size in (1, 4095, 1 << 20, (1 << 20) + 1)
    }
    path = tmp_path / "m.safetensors"
    write_unaligned(path, tensors)
    for way in ("auto", "fallback"):
        with forebay.safe_open(path, options={"path": way}) as model:
            for name, tensor in tensors.items():
                assert raw(model.get_tensor(name)) == raw(tensor)
