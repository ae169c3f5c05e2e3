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

Errors are subclasses of `forebay.Error` with a stable `code`. `last_report()` says what the last load of this thread
did: rates, paths and why, memory, what was verified and what cannot be.
"""

from forebay._errors import (
    AlreadyExistsError,
    CancelledError,
    ChecksumError,
    DataError,
    DeadlineError,
    DeviceError,
    Error,
    FileChangedError,
    ForkedError,
    InternalError,
    IoError,
    NoSpaceError,
    NoSuchTensorError,
    NotFoundError,
    OutOfMemoryError,
    PermissionDeniedError,
    SharedTensorsError,
    SliceError,
    UnsupportedError,
    UsageError,
)
from forebay._load import load_file
from forebay._native import __version__
from forebay._open import SafeOpen, TensorSlice, safe_open
from forebay._options import release_memory
from forebay._report import last_report
from forebay._save import save_file, save_model, save_sharded

__all__ = [
    "AlreadyExistsError",
    "CancelledError",
    "ChecksumError",
    "DataError",
    "DeadlineError",
    "DeviceError",
    "Error",
    "FileChangedError",
    "ForkedError",
    "InternalError",
    "IoError",
    "NoSpaceError",
    "NoSuchTensorError",
    "NotFoundError",
    "OutOfMemoryError",
    "PermissionDeniedError",
    "SafeOpen",
    "SharedTensorsError",
    "SliceError",
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
