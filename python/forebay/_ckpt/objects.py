"""Values that are no tensors: to bytes and back.

To bytes: a pickle of protocol 2, which the native part puts into a `torch.save` archive. Only what holds tensors goes
through `torch.save` itself.

Back: plain data (numbers, text, lists, dicts) is read by an unpickler that knows no classes. Anything else goes
through torch's restricted unpickler (`weights_only=True`), which knows tensors and a few harmless classes, and here
also numpy's arrays, because generators of random numbers keep their state in them. Only `weights_only=False` executes
what a pickle says.

Python's unpickler makes room for whatever number a pickle names, and hashes keys however long that takes. So a pickle
is looked through by the native part before Python sees it (`check_pickle`): what honest pickles do not ask for is
refused.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from forebay import _native
from forebay._errors import Error, make, quoted

#: Objects of one call to the native part, which takes no more.
_AT_ONCE = 4096

#: A pickle, or a whole archive of torch.save.
Stored = bytes | tuple[bytes, bool]

#: Values of these types hold no tensors.
_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))


class _HoldsTensorsError(Exception):
    """The value holds tensors."""


class _Pickler(pickle.Pickler):
    """Stops at the first tensor."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 2)
        #: Whether it holds more than what pickle handles itself.
        self.more = False

    def reducer_override(self, value: Any) -> Any:
        # Not asked for numbers, text, lists and dicts, which pickle handles itself.
        if isinstance(value, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            raise _HoldsTensorsError
        self.more = self.more or type(value) is not OrderedDict
        return NotImplemented


def pack(name: str, value: object) -> Stored:
    """The bytes of a value. Errors: `unsupported` for what cannot be pickled."""
    try:
        if type(value) in _PLAIN:
            return pickle.dumps(value, 2)
        try:
            written = io.BytesIO()
            pickler = _Pickler(written)
            pickler.dump(value)
        except _HoldsTensorsError:
            archive = harmless(value)
            _look_at(name, value, archive)
            return archive, True
        if pickler.more:
            _look_at(name, value)
        return written.getvalue()
    except Exception as error:
        what = f"a value of class {type(value).__name__} cannot be pickled: {error}"
        hint = "save what it is made of, or give it state_dict and load_state_dict"
        raise make("unsupported", what, f"object {quoted(name)}", [hint]) from error


#: Names and classes of values that were looked at before.
_looked_at: set[tuple[str, type]] = set()

#: So many are; no more, so that names which change do not fill memory.
_LOOKED_AT_MAX = 4096


def _look_at(name: str, value: object, archive: bytes | None = None) -> None:
    """Warns, once for each name and class, of a value that `restore` will refuse: a job would find out when it is too
    late. Rank 0 warns for all: what others have by that name is alike."""
    known = (name, type(value))
    if known in _looked_at or len(_looked_at) >= _LOOKED_AT_MAX:
        return
    _looked_at.add(known)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
        return
    try:
        load_archive(name, harmless(value) if archive is None else archive, True)
    except Error as error:
        line = (
            f"{quoted(name)} is saved, and restore refuses it unless it is given weights_only=False: {error.what}. "
            "Save what it is made of (numbers, texts, tensors), or allow the class wherever it is restored: "
            "torch.serialization.add_safe_globals"
        )
        warnings.warn(line, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """How far up the call that came from outside of this package is, for `warnings.warn` of the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("forebay."):
        level, frame = level + 1, frame.f_back
    return level


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """Bytes as protocol 2 has them: text of one character each."""
    if encoding not in ("latin1", "latin-1"):
        raise _NotPlainError
    return text.encode("latin1")


def _bytearray(data: str | bytes = b"", encoding: str = "latin1") -> bytearray:
    # Never a number, which would be a length.
    return bytearray(data if isinstance(data, bytes) else _latin1(data, encoding))


#: What protocol 2 needs for plain data that has no opcode of its own.
_PLAIN_GLOBALS: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): lambda: b"",
    ("__builtin__", "bytearray"): _bytearray,
    ("__builtin__", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
    ("__builtin__", "complex"): complex,
    ("collections", "OrderedDict"): OrderedDict,
}


class _PlainUnpickler(pickle.Unpickler):
    """Reads pickles of plain data: one that names any other class or function is refused, so nothing of it is
    called."""

    def find_class(self, module: str, name: str) -> Any:
        module = "__builtin__" if module == "builtins" else module
        found = _PLAIN_GLOBALS.get((module, name))
        if found is None:
            raise _NotPlainError
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise _NotPlainError


class _NotPlainError(Exception):
    """The pickle holds more than plain data."""


def unpack_all(
    checkpoint: _native.Checkpoint, wanted: Sequence[tuple[int, str]], weights_only: bool
) -> list[Any]:
    """The values of objects in a checkpoint: `wanted` has number and name of each entry.

    Small ones come thousands at a time. Errors: `forbidden_global` for classes that are not known to be harmless; what
    reading raises.
    """
    values: list[Any] = []
    for start in range(0, len(wanted), _AT_ONCE):
        values += _unpack_some(checkpoint, wanted[start : start + _AT_ONCE], weights_only)
    return values


def _unpack_some(
    checkpoint: _native.Checkpoint, batch: Sequence[tuple[int, str]], weights_only: bool
) -> list[Any]:
    pickles = checkpoint.pickles([number for number, _ in batch])
    values: list[Any] = []
    left: list[int] = []
    for place, found in enumerate(pickles):
        value = None
        try:
            if found is None:
                raise _NotPlainError
            value = _PlainUnpickler(io.BytesIO(found)).load()
        except Exception:  # noqa: BLE001
            # More than plain data, or damaged.
            left.append(place)
        values.append(value)
    # Up to 256 MiB, and the archives may have as much.
    del pickles
    archives = checkpoint.archives([batch[place][0] for place in left]) if left else []
    for place, archive in zip(left, archives, strict=True):
        name = batch[place][1]
        archive = checkpoint.object(name) if archive is None else archive
        values[place] = load(name, archive, weights_only)
    return values


def load(name: str, archive: bytes, weights_only: bool) -> Any:
    """The value in the bytes of an item. Errors: `forbidden_global`, `invalid_item`."""
    try:
        found = _pickle_of(archive)
        _native.Checkpoint.check_pickle(found)
    except Exception as error:
        if not weights_only:
            return load_archive(name, archive, weights_only)
        what = error.what if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        hints = error.hints if isinstance(error, Error) else []
        what = f"a stored value cannot be read: {what}"
        raise make("invalid_item", what, f"object {quoted(name)}", hints) from error
    try:
        return _PlainUnpickler(io.BytesIO(found)).load()
    except Exception:  # noqa: BLE001
        # More than plain data, or damaged: torch knows which.
        return load_archive(name, archive, weights_only)


def harmless(value: Any) -> bytes:
    """An archive of a value that was read already, for those who will run what its pickle says: never are the bytes
    that were looked at handed on, as what one reader finds in them another need not."""
    archive = io.BytesIO()
    torch.save(value, archive)
    return archive.getvalue()


def _pickle_of(archive: bytes) -> bytes:
    """The pickle in an archive. Plain data is read from it in a quarter of the time that `torch.load` takes. Errors:
    `invalid_item`; what zipfile raises."""
    with zipfile.ZipFile(io.BytesIO(archive)) as records:
        found = [one for one in records.namelist() if one.rpartition("/")[2] == "data.pkl"]
        if len(found) != 1:
            # Of two, torch may read the other one.
            raise make("invalid_item", f"an archive with {len(found)} pickles, one is needed")
        return records.read(found[0])


def load_archive(name: str, archive: bytes, weights_only: bool) -> Any:
    """The value in the bytes of a torch.save archive. Errors: `forbidden_global`, `invalid_item`."""
    try:
        with _numpy_allowed() if weights_only else nullcontext():
            return torch.load(io.BytesIO(archive), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        hints = [
            "torch.serialization.add_safe_globals allows a class that you trust",
            "weights_only=False runs whatever the pickle says: only for files that you trust",
        ]
        what, causes = _refused(str(error))
        raise make("forbidden_global", what, f"object {quoted(name)}", hints, causes) from error
    except Exception as error:
        # Damaged pickles make the unpickler fail in every way there is.
        what = f"a stored value cannot be read: {type(error).__name__}: {error}"
        raise make("invalid_item", what, f"object {quoted(name)}") from error


#: How torch names a class or function that it refuses, and the line of its text that says why.
_REFUSED = re.compile(
    r"\bGLOBAL ([\w.]+) was not an allowed global|`?add_safe_globals\(\[([\w.]+)\]\)"
)
_WHY = re.compile(r"(?:WeightsUnpickler error|Unsupported [a-z]+): *([^\n]+)")


def _refused(text: str) -> tuple[str, list[str]]:
    """What a text of torch's restricted unpickler comes to, and the cause in its words. The rest of it is what to call in
    place of `torch.load`, which nobody has called here."""
    found = _REFUSED.search(text)
    if found is not None:
        name = found[1] or found[2]
        return f"a stored value holds {quoted(name)}, which is not known to be harmless", []
    why = _WHY.search(text)
    lines = [why[1]] if why is not None else text.strip().splitlines()[:1]
    what = "a stored value needs classes that are not known to be harmless"
    return what, [_ESCAPE.sub("", line).partition(". Please use")[0] for line in lines]


#: Colours of a terminal.
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def _numpy_allowed() -> AbstractContextManager[object]:
    """Lets the restricted unpickler make numpy arrays of plain dtypes."""
    allow: Callable[[list[Any]], AbstractContextManager[object]] | None
    allow = getattr(torch.serialization, "safe_globals", None)
    numpy = sys.modules.get("numpy")
    if allow is None or numpy is None:
        return nullcontext()
    core = sys.modules.get("numpy._core.multiarray") or sys.modules.get("numpy.core.multiarray")
    rebuild = getattr(core, "_reconstruct", None)
    kinds = {type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdFD"}
    allowed: AbstractContextManager[object] = allow(
        [numpy.ndarray, numpy.dtype, *kinds, *([rebuild] if rebuild else [])]
    )
    return allowed
