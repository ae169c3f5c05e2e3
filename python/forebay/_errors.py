"""Exceptions: one class a kind, with the stable code of docs/ERRORS.md as `.code`.

Each is also the built-in exception that Python code expects for its kind (`KeyError` for a missing tensor,
`FileNotFoundError` for a missing file), so that handlers written for other libraries keep working.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forebay import _native

#: Characters of a name that a message shows.
_SHOWN_CHARS = 200


def plain(text: str) -> str:
    """Text that cannot write to a terminal: control characters, line ends and half characters are escaped as in a
    Python literal. What is escaped already stays as it is."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def quoted(name: object) -> str:
    """A name out of a file or a call, for a message: in backticks, escaped, long ones cut."""
    text = str(name)
    if len(text) > _SHOWN_CHARS:
        return f"`{plain(text[:_SHOWN_CHARS])}`... ({len(text)} characters)"
    return f"`{plain(text)}`"


class Error(Exception):
    """What every exception of Forebay is.

    `str()` is the message as the `forebay` command prints it: code, what, where, causes and hints, a line each. Names
    in it come from files: whatever they hold, no line holds a control character.
    """

    code: str
    what: str
    where: str | None
    hints: tuple[str, ...]
    causes: tuple[str, ...]

    def __init__(
        self,
        code: str,
        what: str,
        where: str | None = None,
        hints: Iterable[str] = (),
        causes: Iterable[str] = (),
        errno: int | None = None,
    ) -> None:
        self.code = code
        self.what = plain(what)
        self.where = None if where is None else plain(where)
        self.hints = tuple(map(plain, hints))
        self.causes = tuple(map(plain, causes))
        self._errno = errno
        if errno is not None and isinstance(self, OSError):
            super().__init__(errno, self.render())
        else:
            super().__init__(self.render())

    def render(self) -> str:
        """The whole message."""
        place = f", {self.where}" if self.where is not None else ""
        lines = [f"error[{self.code}]: {self.what}{place}"]
        lines += [f"  caused by: {cause}" for cause in self.causes]
        lines += [f"hint: {hint}" for hint in self.hints]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.code, self.what, self.where, self.hints, self.causes, self._errno)
        return (type(self), arguments)


class UsageError(Error, ValueError):
    """The call is wrong."""


class SliceError(UsageError, IndexError):
    """A slice or region does not fit its tensor."""


class UnsupportedError(UsageError, NotImplementedError):
    """Valid, but not supported here; the hints say what is."""


class SharedTensorsError(UsageError, RuntimeError):
    """Tensors to be saved share memory."""


class StructureMismatchError(UsageError, RuntimeError):
    """What was saved and what is asked for, or what ranks hold, is built differently."""


class NoSuchTensorError(Error, KeyError):
    """No tensor has that name."""


class DataError(Error, ValueError):
    """The data is damaged or breaks its format."""


class ChecksumError(DataError):
    """A checksum does not match the bytes."""


class FileChangedError(DataError):
    """A file changed while it was in use."""


class NotCommittedError(DataError):
    """A checkpoint was never committed."""


class ForbiddenGlobalError(DataError):
    """A pickle names a class or function that is not known to be harmless."""


class IoError(Error, OSError):
    """The system said no; `errno` is its number where it gave one."""


class NotFoundError(IoError, FileNotFoundError):
    """No such file or folder."""


class PermissionDeniedError(IoError, PermissionError):
    """The system denied access."""


class AlreadyExistsError(IoError, FileExistsError):
    """The file exists and must not be replaced."""


class NoSpaceError(IoError):
    """No space left, or a quota is used up."""


class FencedError(IoError):
    """A later writer has taken over."""


class LostCommitError(IoError):
    """Another attempt at the same step was committed first."""


class DeadlineError(IoError, TimeoutError):
    """The operation did not end in its time."""


class OutOfMemoryError(Error, MemoryError):
    """Memory could not be had."""


class DeviceError(Error, RuntimeError):
    """No such device or no driver for it, or it failed."""


class CancelledError(Error):
    """The operation was cancelled."""


class ForkedError(Error, RuntimeError):
    """An object made before a fork was used after it."""


class InternalError(Error, RuntimeError):
    """A fault of Forebay's own; please report it."""


_BY_CODE: dict[str, type[Error]] = {
    "bad_slice": SliceError,
    "unsupported": UnsupportedError,
    "structure_mismatch": StructureMismatchError,
    "no_such_tensor": NoSuchTensorError,
    "checksum": ChecksumError,
    "file_changed": FileChangedError,
    "not_committed": NotCommittedError,
    "forbidden_global": ForbiddenGlobalError,
    "not_found": NotFoundError,
    "permission_denied": PermissionDeniedError,
    "already_exists": AlreadyExistsError,
    "no_space": NoSpaceError,
    "fenced": FencedError,
    "lost_commit": LostCommitError,
    "out_of_memory": OutOfMemoryError,
    "no_device": DeviceError,
    "device": DeviceError,
    "cancelled": CancelledError,
    "timeout": DeadlineError,
    "forked": ForkedError,
}

_BY_CATEGORY: dict[str, type[Error]] = {
    "usage": UsageError,
    "data": DataError,
    "system": IoError,
    "internal": InternalError,
}

#: The class of every code.
CLASSES: dict[str, type[Error]] = {
    code: _BY_CODE.get(code, _BY_CATEGORY[category]) for code, category in _native.codes()
}


def make(
    code: str,
    what: str,
    where: str | None = None,
    hints: Sequence[str] = (),
    causes: Sequence[str] = (),
    errno: int | None = None,
) -> Error:
    """The exception of a code. The native module calls this for its errors."""
    return CLASSES.get(code, InternalError)(code, what, where, hints, causes, errno)


def usage(what: str, *hints: str, where: str | None = None) -> Error:
    """A `usage` error."""
    return make("usage", what, where, hints)
