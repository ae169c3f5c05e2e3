"""From a running session to tensors.

A session wants the addresses of its targets in order and works on what it has. So memory is made in batches: a small one
first, that workers start at once, then larger ones, because each costs a call and, on a GPU, an event. Allocation so
overlaps the transfers.

Where memory is bounded (`stream`), targets are provided while they fit the budget and handed over as they arrive. A piece
of a file that covers several small tensors is read only when all of them have memory; so the session is started in
batches of half the budget, which pieces do not cross, and a larger tensor goes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from forebay import _native
from forebay._catalog import Catalog
from forebay._errors import Error, make, quoted
from forebay._frameworks import Framework, FrameworkDtype, Shape, Tensor, stored_shape
from forebay._options import Options
from forebay._process import remember_session
from forebay._select import Region

#: Tensors of the first batch and of the last ones, and bytes after which one goes in any case: both double from batch
#: to batch. Memory is made several times faster than it is filled, so a larger batch is ready before the last is full.
_BATCH_FIRST = 8
_BATCH_LAST = 1024
_BATCH_BYTES_FIRST = 32 << 20
_BATCH_BYTES_LAST = 256 << 20

Want = tuple[int, Region]


class Layout:
    """What the framework needs to know about the targets of a load, in order."""

    def __init__(
        self, catalog: Catalog, framework: Framework, wants: Sequence[Want] | None, raw: bool
    ) -> None:
        entries = catalog.entries
        kinds: dict[str, tuple[FrameworkDtype, int]] = {}
        self.shapes: list[Shape] = []
        self.dtypes: list[FrameworkDtype] = []
        self.bytes: list[int] = []
        if wants is None:
            wants = [(place, None) for place in range(len(entries))]
        for place, region in wants:
            entry = entries[place]
            kind = kinds.get(entry.dtype)
            if kind is None:
                kind = kinds[entry.dtype] = _dtype_of(framework, entry.dtype, raw, entry.name)
            shape, size = entry.shape, entry.bytes
            if region is not None:
                whole = 1
                part = 1
                for side, cut in zip(shape, region[1], strict=True):
                    whole *= side
                    part *= cut
                size = size * part // whole if whole else 0
                shape = tuple(region[1])
            dtype = kind[0]
            if kind[1] == 2 and raw and shape and shape[-1] % 2:
                # Rows of half bytes: all that is left is the bytes.
                dtype, shape = framework.dtype("U8", False)[0], (size,)
            elif kind[1] != 1:
                shape = stored_shape(shape, entry.dtype, kind[1], entry.name)
            if size == 0 and framework.name == "numpy":
                _check_holdable(shape, entry.name)
            self.shapes.append(shape)
            self.dtypes.append(dtype)
            self.bytes.append(size)

    def __len__(self) -> int:
        return len(self.shapes)


def _dtype_of(framework: Framework, dtype: str, raw: bool, name: str) -> tuple[Any, int]:
    try:
        return framework.dtype(dtype, raw)
    except Error as error:
        where = f"tensor {quoted(name)}"
        causes = (error.causes, error._errno)
        raise type(error)(error.code, error.what, where, error.hints, *causes) from error.__cause__


def _check_holdable(shape: Shape, name: str) -> None:
    """Zero elements fit any file, but numpy counts the other sides all the same."""
    reach = 8
    for side in shape:
        reach *= max(side, 1)
    if reach >= 1 << 63:
        what = f"shape {list(shape)} is beyond what numpy can hold"
        raise make("unsupported", what, f"tensor {quoted(name)}", ["leave it out with names="])


def start(
    catalog: Catalog,
    engine: _native.Engine,
    wants: Sequence[Want] | None,
    options: Options,
    budget: int | None = None,
) -> _native.Session:
    """Starts a session for `wants`, ascending by place; `None` for everything. With a `budget` of bytes it is made for
    `stream`: in batches of half of it, so that one arrives while the other is with the consumer."""
    session = engine.start(
        catalog.model,
        wants,
        threads=options.threads,
        path=options.path,
        cache=options.cache,
        batch_bytes=None if budget is None else max(budget // 2, 1),
    )
    remember_session(session)
    return session


def fill_new(
    session: _native.Session, framework: Framework, layout: Layout
) -> tuple[list[Tensor], float]:
    """Makes memory for every target; returns the tensors, not yet filled, and the seconds that it took."""
    tensors: list[Tensor] = []
    seconds = 0.0
    stream = framework.stream()
    first, total = 0, len(layout)
    count, size = _BATCH_FIRST, _BATCH_BYTES_FIRST
    while first < total:
        last = _batch_end(layout.bytes, first, count, size)
        began = perf_counter()
        made, addresses = framework.empty_many(layout.shapes[first:last], layout.dtypes[first:last])
        seconds += perf_counter() - began
        session.provide(addresses, made, stream)
        tensors += made
        first = last
        count, size = min(count * 2, _BATCH_LAST), min(size * 2, _BATCH_BYTES_LAST)
    return tensors, seconds


def _batch_end(sizes: Sequence[int], first: int, count: int, most: int) -> int:
    taken = 0
    last = first
    end = min(first + count, len(sizes))
    while last < end and taken < most:
        taken += sizes[last]
        last += 1
    return last


def stream(
    session: _native.Session,
    framework: Framework,
    layout: Layout,
    budget: int,
    file_of: Sequence[int],
    model: _native.Model,
    check: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Tensor]]:
    """Yields (target, tensor) as they arrive, with at most `budget` bytes waiting or being filled.

    A tensor counts until the next one is asked for. `check` is called before each. Left early, the session is
    cancelled. `file_of` is the number of each target's file in the model: no tensor is yielded before its file was
    found unchanged after it had been read.

    Errors: `file_changed`, and what ended the session.
    """
    total = len(layout)
    sizes, needs = layout.bytes, session.needs()
    held: dict[int, Tensor] = {}
    delivered = bytearray(total)
    live = provided = first = 0
    try:
        while first < total:
            begin = provided
            while provided < total and (
                live == 0 or live + sizes[provided] <= budget or provided < needs[first]
            ):
                live += sizes[provided]
                provided += 1
            if provided > begin:
                made, addresses = framework.empty_many(
                    layout.shapes[begin:provided], layout.dtypes[begin:provided]
                )
                session.provide(addresses, made, framework.stream())
                held.update(zip(range(begin, provided), made, strict=True))
                del made
            ready = session.next_ready() or []
            # One look for all that have arrived; nobody may stay for the one at the end of the session.
            model.check_files(list({file_of[target] for target in ready}))
            for target in ready:
                tensor = held.pop(target)
                delivered[target] = 1
                check()
                yield target, tensor
                del tensor
                live -= sizes[target]
            while first < total and delivered[first]:
                first += 1
    except BaseException:
        session.cancel()
        raise
