"""Every code becomes the exception of its kind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

import forebay
from forebay import _native
from forebay._errors import CLASSES

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
