"""Objects to bytes and back, without running what a pickle says."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay._ckpt import objects

_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.frozensets(st.integers()),
)
_values = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
    ),
    max_leaves=20,
)


def archive_of(stored: objects.Stored) -> bytes:
    """What the native part makes of a pickle."""
    if not isinstance(stored, bytes):
        return stored[0]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as records:
        records.writestr("archive/data.pkl", stored)
        records.writestr("archive/version", "3\n")
    return made.getvalue()


@given(_values)
@settings(max_examples=100, deadline=None)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    archive = archive_of(objects.pack("x", value))
    for found in (objects.load("x", archive, True), objects.load_archive("x", archive, False)):
        assert found == value and type(found) is type(value)
    assert objects.load("x", archive, True) == value
    again = io.BytesIO(objects.harmless(value))
    assert torch.load(again, weights_only=False) == value


def test_only_what_holds_tensors_is_an_archive_of_torch() -> None:
    assert isinstance(objects.pack("x", {"a": [1, (2, "x")]}), bytes)
    stored = objects.pack("x", (1, {"t": torch.ones(2)}))
    assert isinstance(stored, tuple)
    found = objects.load_archive("x", stored[0], True)
    assert found[1]["t"].tolist() == [1, 1]


class _Calls:
    """A pickle of it calls something."""

    def __init__(self, what: Any, *arguments: Any) -> None:
        self.call = (what, arguments)

    def __reduce__(self) -> Any:
        return self.call


def test_nothing_else_is_called(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    calls = [
        _Calls(os.system, f"touch {mark}"),
        _Calls(open, str(mark), "w"),
        _Calls(eval, "1"),
        _Calls(bytes, 1 << 40),
        _Calls(__import__, "this"),
    ]
    for call in calls:
        for protocol in (0, 2, 4):
            archive = archive_of(pickle.dumps({"x": call}, protocol))
            with pytest.raises(forebay.Error) as caught:
                objects.load("name", archive, True)
            assert caught.value.code in ("forbidden_global", "invalid_item") and "name" in str(
                caught.value
            )
    assert not mark.exists()


def test_a_damaged_object_is_an_error() -> None:
    archive = archive_of(objects.pack("x", {"a": [1.5, "text", b"\xff"] * 5}))
    for at in range(0, len(archive), 3):
        damaged = archive[:at] + bytes([archive[at] ^ 0x55]) + archive[at + 1 :]
        try:
            objects.load("x", damaged, True)
        except forebay.Error as error:
            assert error.code in ("forbidden_global", "invalid_item"), error


#: A value that is kept as number 2^27; a tuple of 2^60 values as a key.
_BOMBS = {
    "memo": b"\x80\x02Nr\x00\x00\x00\x08.",
    "keys": b"\x80\x02}K\x01\x85q\x00" + b"0h\x00h\x00\x86q\x00" * 60 + b"K\x01s.",
}


@pytest.mark.parametrize("kind", _BOMBS)
def test_pickles_that_take_all_memory_or_time_are_refused(kind: str) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as records:
        records.writestr("archive/data.pkl", _BOMBS[kind])
    with pytest.raises(forebay.Error, match="damaged pickle") as caught:
        objects.load("e.0", made.getvalue(), True)
    assert caught.value.code == "invalid_item" and "e.0" in str(caught.value)


def test_an_archive_of_two_pickles_is_refused() -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as records:
        for folder in ("a", "b"):
            records.writestr(f"{folder}/data.pkl", b"\x80\x02N.")
    with pytest.raises(forebay.Error, match="2 pickles"):
        objects.load("e", made.getvalue(), True)


def _reads() -> int:
    """Read calls of this process, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["syscr"])


def test_many_objects_are_read_together(tmp_path: Path) -> None:
    """Plain ones, and such as need torch's unpickler."""
    count = 3000
    sizes = [torch.Size([number, 2]) for number in range(count)]
    saved: dict[str, Any] = {f"n{number}": number for number in range(count)}
    saved |= {f"s{number}": size for number, size in enumerate(sizes)}
    with forebay.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved, blocking=True)
        found: dict[str, Any] = dict.fromkeys(saved)
        checkpointer.restore(found)
        assert found == saved
        assert all(type(found[f"s{number}"]) is torch.Size for number in range(count))
        again: dict[str, Any] = dict.fromkeys(saved)
        before = _reads()
        checkpointer.restore(again)
        # 6000 objects, 4096 at a time, and 3000 of them once more.
        assert _reads() - before < 300


class Config:
    """Nothing that torch knows."""

    def __init__(self) -> None:
        self.width = 3


def test_what_restore_refuses_is_told_when_it_is_saved(tmp_path: Path) -> None:
    told = r"`(config|pair)` is saved, and restore refuses it.*test_ckpt_objects\.Config`.*add_safe_globals"
    with forebay.Checkpointer(tmp_path) as checkpoints:
        state = {
            "config": Config(),
            "pair": (torch.ones(2), Config()),
            "fine": OrderedDict(a={1, 2}),
        }
        with pytest.warns(UserWarning, match=told) as warned:
            checkpoints.save(1, state, blocking=True)
        assert len(warned) == 2 and {one.filename for one in warned} == {__file__}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoints.save(2, state, blocking=True)
            harmless = {
                "numbers": numpy.ones(3),
                "size": torch.Size([1]),
                "z": 1j,
                "d": torch.float32,
            }
            checkpoints.save(3, harmless, blocking=True)
        with pytest.raises(forebay.Error) as caught:
            checkpoints.restore(state, step=1)
        assert caught.value.code == "forbidden_global"
        text = str(caught.value)
        assert "test_ckpt_objects.Config" in text, text
        assert "\x1b" not in text and "two options" not in text and len(text.splitlines()) < 8, text
        checkpoints.restore(state, step=1, weights_only=False)
        assert state["config"].width == 3


def test_texts_of_torch_are_cut() -> None:
    text = "Weights only load failed. \x1b[1mDo not\x1b[0m.\n\tWeightsUnpickler error: Unsupported operand 149\nMore"
    what, causes = objects._refused(text)
    assert "not known" in what and causes == ["Unsupported operand 149"]
    assert objects._refused("\x1b[1mother\x1b[0m text\nmore")[1] == ["other text"]
