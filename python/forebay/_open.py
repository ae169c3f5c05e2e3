"""`safe_open`: one tensor, one slice, or all in order of arrival."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from operator import index as as_int
from types import EllipsisType, TracebackType
from typing import Any

from forebay import _native
from forebay._catalog import Catalog, Paths
from forebay._errors import Error, make, quoted, usage
from forebay._frameworks import BITS, Shape, Tensor
from forebay._options import engine
from forebay._options import parse as parse_options
from forebay._places import parse as parse_place
from forebay._report import remember
from forebay._select import Names, Region, places_of
from forebay._transfer import Layout, Want, fill_new, start, stream

#: Whole tensors up to this size are read by the calling thread, if the page cache has them: starting workers costs
#: 100 us, in which one thread copies 500 KB or so.
_INLINE_BYTES = 1 << 20

#: Gaps that the engine reads through anyway: steps below that are read as a span.
_GAP_BYTES = 16 << 10

#: Rows that are asked for one by one at the most.
_ROWS_MAX = 1 << 16

_FRAMEWORKS = {
    "pt": "pt",
    "torch": "pt",
    "pytorch": "pt",
    "np": "np",
    "numpy": "np",
}


def safe_open(
    path: Paths,
    framework: str = "pt",
    device: object = "cpu",
    *,
    raw: bool = False,
    threads: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> SafeOpen:
    """Opens a model, as `safetensors.safe_open` opens a file.

    Args:
        path: a folder (its index decides, if it has one), an index, a file, or a list of files.
        framework: "pt" or "np".
        device: where tensors are made, as for `load_file`.
        raw, threads, options: as for `load_file`.
    """
    return SafeOpen(path, framework, device, raw=raw, threads=threads, options=options)


class SafeOpen:
    """An open model. A context manager; after its end every use raises. Tensors that it gave out stay valid.

    It may be used by several threads, and in the child of a fork (which gets an engine of its own); an iterator belongs
    to the process that made it.
    """

    def __init__(
        self,
        path: Paths,
        framework: str = "pt",
        device: object = "cpu",
        *,
        raw: bool = False,
        threads: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        known = _FRAMEWORKS.get(framework) if isinstance(framework, str) else None
        if known is None:
            raise usage(f"no framework is called {framework!r}", "say 'pt' or 'np'")
        if known == "np" and device == "cpu":
            device = "host"
        self._options = parse_options(options, threads)
        self._place = parse_place(device, known)
        self._raw = raw
        self._catalog: Catalog | None = Catalog(path)
        self._running: weakref.WeakSet[_native.Session] = weakref.WeakSet()

    def __enter__(self) -> SafeOpen:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the use of the model: running iterators are cancelled, files are closed."""
        self._catalog = None
        for session in list(self._running):
            session.cancel()

    def _open(self) -> Catalog:
        if self._catalog is None:
            raise usage("the model is closed", "use it inside of its `with` block")
        return self._catalog

    def keys(self) -> list[str]:
        """The names, sorted."""
        catalog = self._open()
        return [catalog.entries[place].name for place in catalog.model.by_name()]

    def offset_keys(self) -> list[str]:
        """The names in the order of the files' bytes: the fastest order to ask for them."""
        return [entry.name for entry in self._open().entries]

    def metadata(self) -> dict[str, str] | None:
        """The text that came with the tensors (of several files, that of the first)."""
        return self._open().model.metadata()

    def get_tensor(self, name: str) -> Tensor:
        """One tensor. Errors: `no_such_tensor`, and those of `load_file`."""
        catalog = self._open()
        place = catalog.find(name)
        tensor = self._read_inline(catalog, place)
        if tensor is None:
            tensor = self._read(catalog, [(place, None)])[0]
        return tensor

    def get_tensors(self, names: Names | None = None) -> dict[str, Tensor]:
        """All tensors, or those of `names`, in the order of the files' bytes; read together, which is much faster than
        one by one."""
        catalog = self._open()
        places = places_of(catalog, names)
        wants: list[Want] | None = None
        if places is not None:
            wants = [(place, None) for place in places]
        tensors = self._read(catalog, wants)
        chosen = range(len(catalog.entries)) if places is None else places
        return {
            catalog.entries[place].name: tensor
            for place, tensor in zip(chosen, tensors, strict=True)
        }

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to be indexed: only what the index needs is read."""
        catalog = self._open()
        return TensorSlice(self, catalog.find(name))

    def iter_tensors(
        self, names: Names | None = None, max_bytes: int = 1 << 30
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) in order of arrival.

        At most `max_bytes` of tensors are being filled or waiting, the one last yielded included, which counts until the
        next is asked for; a larger tensor goes alone. Small tensors that share a piece of the file (4 MiB) with a larger one
        come with it. Leaving the loop early cancels the rest. Tensors may be kept: they are the caller's.
        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise usage(f"max_bytes is {max_bytes!r}, a whole number of 1 or more is needed")
        catalog = self._open()
        places = places_of(catalog, names)
        chosen = list(range(len(catalog.entries))) if places is None else places
        wants: list[Want] = [(place, None) for place in chosen]
        layout = Layout(catalog, self._place.framework, wants, self._raw)
        return self._iterate(catalog, wants, layout, max_bytes)

    def _iterate(
        self, catalog: Catalog, wants: list[Want], layout: Layout, max_bytes: int
    ) -> Iterator[tuple[str, Tensor]]:
        self._open()
        running = engine(self._place.engine, self._options)
        session = start(catalog, running, wants, self._options, max_bytes)
        self._running.add(session)
        try:

            def check() -> None:
                self._open()
                # Raises in the child of a fork, also where the next tensor has arrived already.
                session.done()

            files = [catalog.entries[place].file for place, _ in wants]
            arriving = stream(
                session, self._place.framework, layout, max_bytes, files, catalog.model, check
            )
            for target, tensor in arriving:
                yield catalog.entries[wants[target][0]].name, tensor
                del tensor
            remember(session.finish())
        except BaseException as error:
            session.cancel()
            if isinstance(error, Error):
                # A cancelled session says so; that it was closed is the better answer.
                self._open()
            raise

    def _read(self, catalog: Catalog, wants: Sequence[Want] | None) -> list[Tensor]:
        layout = Layout(catalog, self._place.framework, wants, self._raw)
        session = start(catalog, engine(self._place.engine, self._options), wants, self._options)
        try:
            tensors, _ = fill_new(session, self._place.framework, layout)
            remember(session.finish())
        except BaseException:
            session.cancel()
            raise
        return tensors

    def _read_inline(self, catalog: Catalog, place: int) -> Tensor | None:
        """A small tensor, without workers, if all of it is in the page cache."""
        entry = catalog.entries[place]
        if entry.bytes > _INLINE_BYTES or self._place.engine != "host":
            return None
        if self._options.path not in ("auto", "copy"):
            return None
        framework = self._place.framework
        layout = Layout(catalog, framework, [(place, None)], self._raw)
        tensor = framework.empty(layout.shapes[0], layout.dtypes[0])
        found = catalog.model.read_cached(place, framework.address(tensor))
        return tensor if found else None

    def _read_box(self, place: int, region: Region) -> Tensor:
        catalog = self._open()
        return self._read(catalog, [(place, region)])[0]

    def _read_rows(
        self, place: int, rows: Sequence[int], region: tuple[list[int], list[int]]
    ) -> Tensor:
        """The box `region`, but of the first dimension these rows: each straight into its place of one tensor."""
        catalog = self._open()
        framework = self._place.framework
        offsets, sizes = region
        one = Layout(catalog, framework, [(place, (offsets, [1, *sizes[1:]]))], self._raw)
        tensor = framework.empty((len(rows), *one.shapes[0][1:]), one.dtypes[0])
        row_bytes, base = one.bytes[0], framework.address(tensor)
        # Reading order is that of the rows in the file.
        order = sorted(range(len(rows)), key=rows.__getitem__)
        wants: list[Want] = [(place, ([rows[at], *offsets[1:]], [1, *sizes[1:]])) for at in order]
        session = start(catalog, engine(self._place.engine, self._options), wants, self._options)
        try:
            addresses = [base + at * row_bytes for at in order]
            session.provide(addresses, [tensor] * len(rows), framework.stream())
            remember(session.finish())
        except BaseException:
            session.cancel()
            raise
        return tensor


#: One dimension of an index: where its box starts, its length there, and what to do with the box; and the step.
_Cut = tuple[int, int, Any, int]


class TensorSlice:
    """A tensor of an open model, to be indexed like the tensor itself.

    `slice[index]` equals `get_tensor(name)[index]`, for every index that the framework takes, and raises what it
    raises; it is contiguous and has its own memory. Only the bytes that the index needs are read for integers,
    slices, `...` and `None`, and for a list of rows; other indices (masks, several lists) read the whole tensor.

    F4 tensors are indexed in elements, as `get_shape` counts them; in the last dimension by slices of step 1.
    """

    def __init__(self, model: SafeOpen, place: int) -> None:
        self._model = model
        self._place = place
        self._entry = model._open().entries[place]

    def get_shape(self) -> list[int]:
        """The shape in the file."""
        self._model._open()
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The dtype's name in the file."""
        self._model._open()
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Tensor:
        self._model._open()
        framework = self._model._place.framework
        # Says what the framework says about a bad index, before anything is read.
        view = framework.view(self._entry.shape)
        framework.pick(view, index)
        items = index if isinstance(index, tuple) else (index,)
        if all(_is_basic(item) for item in items) and sum(item is ... for item in items) < 2:
            return self._basic(items)
        rows = _rows_of(items, self._entry.shape)
        if rows is not None:
            return self._rows(rows)
        self._needs_whole_bytes()
        return framework.own(framework.pick(self._model.get_tensor(self._entry.name), index))

    def _needs_whole_bytes(self) -> None:
        if BITS[self._entry.dtype] < 8:
            what = (
                f"{self._entry.dtype} tensors are indexed by slices of step 1 in the last dimension"
            )
            raise make("unsupported", what, f"tensor {quoted(self._entry.name)}")

    def _basic(self, items: tuple[Any, ...]) -> Tensor:
        """Reads the box around the index, then applies what is left of it (integers, steps, new dimensions)."""
        shape = self._entry.shape
        cuts, rest = _cuts_of(items, shape)
        offsets = [cut[0] for cut in cuts]
        sizes = [cut[1] for cut in cuts]
        packed = self._model._place.framework.dtype(self._entry.dtype, self._model._raw)[1] != 1
        if packed and (not cuts or cuts[-1][2] != slice(None)):
            self._needs_whole_bytes()
        first = cuts[0][3] if cuts else 1
        row_bytes = self._entry.bytes // shape[0] if shape and shape[0] else 0
        if first > 1 and first * row_bytes > _GAP_BYTES and sizes[0] // first < _ROWS_MAX:
            rows = range(offsets[0], offsets[0] + sizes[0], first)
            at = next(at for at, item in enumerate(rest) if item is not None)
            rest[at] = slice(None)
            box = self._model._read_rows(self._place, rows, (offsets, sizes))
        elif tuple(sizes) == shape:
            box = self._model.get_tensor(self._entry.name)
        else:
            box = self._model._read_box(self._place, (offsets, sizes))
        framework = self._model._place.framework
        return framework.own(framework.pick(box, tuple(rest)))

    def _rows(self, rows: list[int]) -> Tensor:
        framework = self._model._place.framework
        offsets, sizes = [0] * len(self._entry.shape), list(self._entry.shape)
        if not rows:
            return self._model._read_box(self._place, (offsets, [0, *sizes[1:]]))
        row_bytes = self._entry.bytes // self._entry.shape[0]
        if len(rows) <= _ROWS_MAX and row_bytes > 0:
            return self._model._read_rows(self._place, rows, (offsets, sizes))
        self._needs_whole_bytes()
        whole = self._model.get_tensor(self._entry.name)
        return framework.own(framework.pick(whole, rows))


def _is_basic(item: object) -> bool:
    """Integers, slices, `...` and `None`; what has dimensions of its own, or may be a mask, is not."""
    if item is None or isinstance(item, slice | EllipsisType):
        return True
    if hasattr(item, "dtype"):
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(item, numpy.integer)
    return hasattr(item, "__index__") and not isinstance(item, bool)


def _cuts_of(items: tuple[Any, ...], shape: Shape) -> tuple[list[_Cut], list[Any]]:
    """The box of a basic index that fits the shape, and the index that is left to apply to the box."""
    cuts: list[_Cut] = []
    rest: list[Any] = []
    taken = sum(item is not None and item is not ... for item in items)
    for item in items:
        if item is None:
            rest.append(None)
        elif item is ...:
            for side in shape[len(cuts) : len(cuts) + len(shape) - taken]:
                cuts.append((0, side, slice(None), 1))
                rest.append(slice(None))
        elif isinstance(item, slice):
            positions = range(*item.indices(shape[len(cuts)]))
            step = positions.step if len(positions) > 1 else 1
            first, last = (min(positions), max(positions)) if positions else (0, -1)
            # numpy takes negative steps: the box is the same, and is walked from its end.
            left = slice(None) if step == 1 else slice(None, None, step)
            cuts.append((first, last - first + 1, left, step))
            rest.append(left)
        else:
            at = as_int(item)
            cuts.append((at + shape[len(cuts)] if at < 0 else at, 1, 0, 1))
            rest.append(0)
    for side in shape[len(cuts) :]:
        cuts.append((0, side, slice(None), 1))
    return cuts, rest


def _rows_of(items: tuple[Any, ...], shape: Shape) -> list[int] | None:
    """The rows of an index that is one list of rows and nothing else."""
    if not shape or not items:
        return None
    if not all(
        item is ... or (isinstance(item, slice) and item == slice(None)) for item in items[1:]
    ):
        return None
    rows = items[0]
    if hasattr(rows, "tolist") and getattr(rows, "ndim", 0) == 1:
        rows = rows.tolist()
    if not isinstance(rows, list) or not all(type(row) is int for row in rows):
        return None
    return [row + shape[0] if row < 0 else row for row in rows]
