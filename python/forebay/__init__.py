"""Forebay: tensors between storage and GPU memory, at the speed of the link.

    import forebay

    weights = forebay.load_file("model/", device="cuda:0")
    with forebay.safe_open("model/", device="cuda:0") as model:
        rows = model.get_slice("embed.weight")[1000:2000]
        for name, tensor in model.iter_tensors(max_bytes=1 << 30):
            ...
    forebay.save_file(weights, "copy.safetensors")

Places are a folder (its index decides, if it has one), an index, a file, or a list of files. Outputs are ordinary
tensors of the framework, each with its own memory: they stay valid whatever happens to file or handle. torch and numpy
are imported when they are first needed; `device="host"` needs numpy alone.

Checkpoints of training are saved and restored by `forebay.Checkpointer`, whose `save` returns a `forebay.SaveHandle` and
whose `restore` returns a `forebay.RestoreReport`; `forebay.dcp` has storage classes for `torch.distributed.checkpoint`.
All of these need torch, so they are imported when they are first asked for: see `help(forebay.Checkpointer)`,
`help(forebay.SaveHandle)`, `help(forebay.RestoreReport)`, `help("forebay.dcp")`.

Errors are subclasses of `forebay.Error` with a stable `code`. `last_report()` says what the last load of this thread
did: rates, paths and why, memory, what was verified and what cannot be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay._errors import (
    AlreadyExistsError,
    CancelledError,
    ChecksumError,
    DataError,
    DeadlineError,
    DeviceError,
    Error,
    FencedError,
    FileChangedError,
    ForbiddenGlobalError,
    ForkedError,
    InternalError,
    IoError,
    LostCommitError,
    NoSpaceError,
    NoSuchTensorError,
    NotCommittedError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    SharedTensorsError,
    SliceError,
    StructureMismatchError,
    UnsupportedError,
    UsageError,
)
from forebay._load import load_file
from forebay._native import __version__
from forebay._open import SafeOpen, TensorSlice, safe_open
from forebay._options import release_memory
from forebay._report import last_report
from forebay._save import save_file, save_model, save_sharded

if TYPE_CHECKING:
    from forebay._ckpt.checkpointer import Checkpointer
    from forebay._ckpt.handle import SaveHandle
    from forebay._ckpt.restorereport import RestoreReport

#: What needs torch, and where it is.
_NEED_TORCH = {
    "Checkpointer": "forebay._ckpt.checkpointer",
    "SaveHandle": "forebay._ckpt.handle",
    "RestoreReport": "forebay._ckpt.restorereport",
}


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is first asked for."""
    home = _NEED_TORCH.get(name)
    if home is None:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Names for `help` and completion; those that need torch where it is installed."""
    from importlib.util import find_spec

    lazy = _NEED_TORCH if find_spec("torch") is not None else ()
    return sorted({*globals(), *lazy})


__all__ = [
    "AlreadyExistsError",
    "CancelledError",
    "Checkpointer",
    "ChecksumError",
    "DataError",
    "DeadlineError",
    "DeviceError",
    "Error",
    "FencedError",
    "FileChangedError",
    "ForbiddenGlobalError",
    "ForkedError",
    "InternalError",
    "IoError",
    "LostCommitError",
    "NoSpaceError",
    "NoSuchTensorError",
    "NotCommittedError",
    "NotFoundError",
    "OutOfMemoryError",
    "PermissionDeniedError",
    "RestoreReport",
    "SafeOpen",
    "SaveHandle",
    "SharedTensorsError",
    "SliceError",
    "StructureMismatchError",
    "TensorSlice",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "last_report",
    "load_file",
    "release_memory",
    "safe_open",
    "save_file",
    "save_model",
    "save_sharded",
]
