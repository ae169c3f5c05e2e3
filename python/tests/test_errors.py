"""Every code becomes the exception of its kind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

import forebay
from forebay import _native
from forebay._errors import CLASSES, quoted

BUILT_IN = {
    "usage": ValueError,
    "bad_slice": IndexError,
    "unsupported": NotImplementedError,
    "no_such_tensor": KeyError,
    "not_found": FileNotFoundError,
    "permission_denied": PermissionError,
    "already_exists": FileExistsError,
    "no_space": OSError,
    "io": OSError,
    "timeout": TimeoutError,
    "out_of_memory": MemoryError,
    "no_device": RuntimeError,
    "device": RuntimeError,
    "forked": RuntimeError,
    "internal": RuntimeError,
}


@pytest.mark.parametrize(("code", "category"), _native.codes())
def test_every_code(code: str, category: str) -> None:
    with pytest.raises(forebay.Error) as caught:
        _native.raise_error(code, "it broke", "here", ["mend it"])
    error = caught.value
    assert type(error) is CLASSES[code]
    assert (error.code, error.what, error.where) == (code, "it broke", "here")
    assert error.hints == ("mend it",)
    assert str(error) == f"error[{code}]: it broke, here\nhint: mend it"
    if category == "usage" and code != "no_such_tensor":
        assert isinstance(error, forebay.UsageError)
    if category == "data":
        assert isinstance(error, forebay.DataError)
    assert isinstance(error, BUILT_IN.get(code, Exception))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert (str(twin), twin.code, twin.hints) == (str(error), code, error.hints)


def test_the_system_number_is_kept(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        forebay.load_file(tmp_path / "nothing.safetensors")
    assert isinstance(caught.value, forebay.NotFoundError)
    assert caught.value.errno == 2
    assert "nothing.safetensors" in str(caught.value)
    assert "caused by: " in str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(forebay.Error) as caught:
        forebay.load_file(tmp_path)
    assert caught.value.code in ("unknown_format", "not_found")


UGLY = "w\x1b[31m\n\u202e"


def test_no_name_reaches_the_terminal_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m\x1b[2J.safetensors"
    forebay.save_file({UGLY: np.ones((2, 3), np.float32), UGLY + "2": np.ones(3)}, path)
    other = tmp_path / "fine.safetensors"
    forebay.save_file({"other": np.ones(1)}, other)

    def model() -> forebay.SafeOpen:
        return forebay.safe_open(path, "np")

    calls = [
        lambda: forebay.load_file(path, "host", names=[UGLY + "3"]),
        lambda: forebay.load_file(path, "host", regions={UGLY: 3}),
        lambda: forebay.load_file(path, "host", shard=lambda name, shape: (5, 0, 2)),
        lambda: forebay.load_file(path, "host", into={UGLY: np.zeros(4, np.float32)}, strict=False),
        lambda: forebay.load_file(path, "host", into={UGLY: np.zeros((2, 3))}, strict=False),
        lambda: forebay.load_file(path, "host", into={UGLY: 3}),
        lambda: forebay.load_file(other, "host", into={UGLY: np.zeros(4)}),
        lambda: forebay.load_file(path, "host", into={}),
        lambda: forebay.load_file(path, "host", expect_sha256="0" * 64),
        lambda: forebay.load_file(path, "host", expect_sha256={UGLY: "0" * 64}),
        lambda: forebay.load_file(path, "host", dtype=UGLY),
        lambda: forebay.load_file(path, UGLY),
        lambda: forebay.load_file(path, "host", options={UGLY: 1}),
        lambda: forebay.load_file(path, "host", options={"path": UGLY}),
        lambda: forebay.load_file(tmp_path / UGLY),
        lambda: forebay.load_file(UGLY),
        lambda: model().get_tensor(UGLY + "3"),
        lambda: forebay.save_file({UGLY: np.ones((2, 3)).T}, tmp_path / "x"),
        lambda: forebay.save_file({UGLY: 3}, tmp_path / "x"),
        lambda: forebay.save_file({UGLY: np.ones(2)}, tmp_path / UGLY / "x"),
        lambda: forebay.save_file({UGLY: np.ones(2)}, tmp_path, {UGLY: 3}),
        lambda: _native.raise_error("io", UGLY, UGLY, [UGLY]),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(forebay.Error) as caught:
            call()
        error = caught.value
        assert str(error).replace("\n", "").isprintable(), (number, str(error))
        for line in (error.what, error.where or "", *error.hints, *error.causes):
            assert line.isprintable(), (number, line)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_names_in_messages_are_cut() -> None:
    assert quoted("w") == "`w`"
    assert quoted("n\u00e9 w.\u6f22") == "`n\u00e9 w.\u6f22`"
    assert quoted("a\ud800") == "`a\\ud800`"
    assert len(quoted("\n" * 100_000)) < 500
