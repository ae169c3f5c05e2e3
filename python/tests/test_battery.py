"""The battery of tests/cases: every file and folder gives its verdict."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from support import TORCH, raw

import forebay

CASES = Path(__file__).parents[2] / "tests" / "cases"
TABLE = json.loads((CASES / "safetensors_cases.json").read_text())
ALL = TABLE["files"] + TABLE["sharded"]


@pytest.fixture(scope="session")
def battery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("battery")
    subprocess.run([sys.executable, CASES / "make_safetensors_cases.py", folder], check=True)
    return folder


def place(battery: Path, case: dict[str, Any]) -> Path:
    return battery / (case.get("file") or case["open"])


def ids(case: dict[str, Any]) -> str:
    return str(case["name"])


@pytest.mark.parametrize("case", [case for case in ALL if case["expected"] == "error"], ids=ids)
def test_bad(battery: Path, case: dict[str, Any]) -> None:
    fair = {case["category"], *case.get("category_also_fair", [])}
    for read in (
        lambda path: forebay.load_file(path),
        lambda path: forebay.load_file(path, "host"),
        lambda path: forebay.safe_open(path),
        lambda path: forebay.safe_open(path, framework="np"),
    ):
        with pytest.raises(forebay.Error) as caught:
            read(place(battery, case))
        assert caught.value.code in fair, str(caught.value)
        assert caught.value.where or "/" in caught.value.what, str(caught.value)


@pytest.mark.parametrize("case", [case for case in ALL if case["expected"] == "ok"], ids=ids)
def test_good(battery: Path, case: dict[str, Any]) -> None:
    path = place(battery, case)
    tensors = {tensor["name"]: tensor for tensor in case["tensors"]}
    loaded = forebay.load_file(path, raw=True)
    assert set(loaded) == set(tensors)
    if case["name"] == "zero_first_then_huge_dims":
        # numpy has no such array; the library fails at it too.
        with pytest.raises(forebay.UnsupportedError, match="`z`"):
            forebay.load_file(path, "host")
        return
    arrays = forebay.load_file(path, "host", raw=True)
    assert set(arrays) == set(tensors)
    with forebay.safe_open(path, raw=True) as model:
        assert model.keys() == sorted(
            tensors, key=lambda name: name.encode("utf-8", "surrogatepass")
        )
        assert sorted(model.offset_keys()) == sorted(tensors)
        if "file" in case:
            assert model.metadata() == case["metadata"]
        for name, tensor in tensors.items():
            expected = tensor["sha256"]
            for found in (loaded[name], model.get_tensor(name)):
                assert hashlib.sha256(raw(found)).hexdigest() == expected
            assert hashlib.sha256(arrays[name].tobytes()).hexdigest() == expected
            piece = model.get_slice(name)
            assert (piece.get_dtype(), piece.get_shape()) == (tensor["dtype"], tensor["shape"])
            if tensor["dtype"] in TORCH and tensor["dtype"] != "F4":
                assert loaded[name].dtype == TORCH[tensor["dtype"]]
                assert list(loaded[name].shape) == tensor["shape"]
        arrived = {name: raw(tensor) for name, tensor in model.iter_tensors()}
        assert arrived == {name: raw(tensor) for name, tensor in loaded.items()}


def test_the_generator_is_there() -> None:
    assert importlib.util.spec_from_file_location("x", CASES / "make_safetensors_cases.py")
    assert len(ALL) > 100
