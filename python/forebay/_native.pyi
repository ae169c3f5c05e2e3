"""The native part of the package. Not for use outside of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

__version__: str

def codes() -> list[tuple[str, str]]: ...
def dtypes() -> list[tuple[str, int]]: ...
def raise_error(
    code: str, what: str, place: str | None = None, hints: Sequence[str] = ()
) -> None: ...
def forget_parent() -> None: ...
def resume_calls() -> None: ...
def wait_for_calls(timeout_ms: int) -> bool: ...
def wait_for_engines(timeout_ms: int) -> bool: ...

@final
class Entry:
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...

@final
class Model:
    @staticmethod
    def open(paths: Sequence[Path], listed: bool) -> Model: ...
    def tensors(self) -> list[Entry]: ...
    def by_name(self) -> list[int]: ...
    def metadata(self) -> dict[str, str] | None: ...
    def files(self) -> list[tuple[str, Path, int]]: ...
    def warnings(self) -> list[str]: ...
    def format(self) -> str: ...
    def check_unchanged(self) -> None: ...
    def check_files(self, files: Sequence[int]) -> None: ...
    def read_cached(self, tensor: int, address: int) -> bool: ...

@final
class Engine:
    def __new__(cls, device: str, config: dict[str, Any]) -> Engine: ...
    def start(
        self,
        model: Model,
        wanted: Sequence[tuple[int, tuple[list[int], list[int]] | None]] | None,
        threads: int | None = None,
        path: str = "auto",
        cache: str = "auto",
        batch_bytes: int | None = None,
    ) -> Session: ...
    @property
    def device(self) -> str: ...

@final
class Session:
    def provide(
        self, addresses: Sequence[int], owners: Sequence[object], stream: int | None = None
    ) -> None: ...
    def needs(self) -> list[int]: ...
    def next_ready(self, timeout_ms: int | None = None) -> list[int] | None: ...
    def finish(self, progress: Callable[[int, int], object] | None = None) -> dict[str, Any]: ...
    def cancel(self) -> bool: ...
    def wait_idle(self, timeout_ms: int) -> bool: ...
    def done(self) -> tuple[int, int]: ...
    def owned(self) -> list[object]: ...

@final
class Digests:
    def __new__(cls, model: Model, files: Sequence[int]) -> Digests: ...
    def finish(self) -> dict[int, str]: ...
    def cancel(self) -> None: ...

@final
class Save:
    @staticmethod
    def file(
        path: Path,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        metadata: Sequence[tuple[str, str]] | None,
    ) -> Save: ...
    @staticmethod
    def folder(
        path: Path,
        tensors: Sequence[tuple[str, str, tuple[int, ...]]],
        metadata: Sequence[tuple[str, str]] | None,
        max_shard_bytes: int,
    ) -> Save: ...
    def write(
        self,
        engine: Engine,
        parts: Sequence[tuple[int, int, int]],
        owners: object,
        threads: int | None = None,
        stream: int | None = None,
    ) -> None: ...
    def commit(self) -> dict[str, Any]: ...
    def abandon(self) -> None: ...

#: Name, path, kind (0 a region of a tensor, 1 an object, 2 another name), dtype, shape, offsets, sizes, writes.
_Item = tuple[
    str, Sequence[str | int], int, str | None, Sequence[int], Sequence[int], Sequence[int], bool
]

@final
class SharedStructure:
    def __new__(
        cls,
        meshes: Sequence[tuple[Sequence[int], Sequence[int]]],
        layouts: Sequence[tuple[int, Sequence[tuple[str, int, int]], bool]],
        values: Sequence[
            tuple[str, Sequence[str | int], int, str | None, Sequence[int], int | None]
        ],
    ) -> SharedStructure: ...
    @property
    def hash(self) -> str: ...

@final
class Structure:
    def __new__(
        cls,
        items: Sequence[_Item],
        *,
        rank: int,
        world: int,
        files_per_rank: int | None = None,
        shared: SharedStructure | None = None,
    ) -> Structure: ...
    @property
    def hash(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def counts(self) -> tuple[int, int]: ...

@final
class Pool:
    def __new__(cls, engine: Engine, bytes: int, prewarm: bool = True) -> Pool: ...
    @property
    def bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def touched_bytes(self) -> int: ...

@final
class Saver:
    def __new__(
        cls,
        root: Path,
        *,
        rank: int,
        world: int,
        run_id: str,
        engine: Engine,
        pool: Pool,
        takers: int | None = None,
        flat: bool = False,
        commit: str = "protocol",
        overwrite: bool = True,
        lease_s: float | None = None,
        deadline_s: float | None = None,
        who: str | None = None,
    ) -> Saver: ...
    def claim(self, parent: int | None = None) -> int: ...
    def start(
        self,
        step: int,
        structure: Structure,
        addresses: Sequence[int],
        places: bytes,
        objects: Sequence[bytes | tuple[bytes, bool]],
        *,
        agreed: str,
        counter: int,
        epoch: int = 0,
        parent: int | None = None,
        stream: int | None = None,
        in_place: bool = False,
        side_files: Sequence[tuple[str, bytes]] = (),
        torch: str | None = None,
        python: str | None = None,
        host: str | None = None,
        keep: object = None,
    ) -> CheckpointSave: ...

@final
class CheckpointSave:
    def staged(self, timeout_s: float | None = None) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def cancel(self) -> None: ...
    def part(self) -> bytes: ...
    def progress(self) -> tuple[int, int]: ...
    def report(self) -> dict[str, Any]: ...

def commit_parts(
    root: Path,
    parts: Sequence[bytes],
    *,
    run_id: str,
    counter: int,
    step: int = 0,
    epoch: int = 0,
    paths: Mapping[str, Sequence[str | int]] = ...,
    overwrite: bool = True,
    torch: str | None = None,
    python: str | None = None,
    host: str | None = None,
) -> bool: ...

@final
class Checkpoint:
    def __new__(cls, path: Path, *, step: int | None = None) -> Checkpoint: ...
    @property
    def entries(
        self,
    ) -> list[tuple[str, tuple[str | int, ...], int, str | None, tuple[int, ...]]]: ...
    @property
    def origin(self) -> str: ...
    @property
    def info(self) -> dict[str, Any]: ...
    @property
    def warnings(self) -> list[str]: ...
    @property
    def side_files(self) -> list[str]: ...
    def chunks(self, name: str) -> list[tuple[list[int], list[int]]]: ...
    def start(
        self,
        engine: Engine,
        wants: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        *,
        threads: int | None = None,
        path: str = "auto",
        cache: str = "auto",
    ) -> tuple[list[int], Session]: ...
    def object(self, name: str) -> bytes: ...
    def side_file(self, name: str) -> bytes: ...

@final
class ReadLease:
    def beat(self) -> None: ...

def steps(folder: Path) -> list[dict[str, Any]]: ...
def latest(folder: Path) -> int | None: ...
def prune(
    folder: Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    pins: Sequence[int] = (),
    grace_s: float = 900.0,
    wait: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]: ...
def gc(folder: Path, *, grace_s: float = 900.0, dry_run: bool = False) -> list[tuple[str, int]]: ...
def read_lease(folder: Path, step: int) -> ReadLease: ...
