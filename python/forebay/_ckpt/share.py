"""Which rank writes what several ranks hold.

Every rank computes the same from the same description, without a word to the others. What one rank alone holds counts
first. Then large pieces go one by one, the largest first, each to the holder that has the fewest bytes by then. Small
ones that the same ranks hold go as bundles to one of them: spread over all files, a restore would open every file for
a few scalars.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

#: Bytes below which a piece is small.
SMALL_BYTES = 64 << 10

#: A bundle of small pieces: 10 ms of one drive's time.
BUNDLE_BYTES = 16 << 20
BUNDLE_PIECES = 1 << 16


def assign(
    pieces: Sequence[tuple[int, tuple[int, ...]]], loads: dict[int, int] | None = None
) -> list[int]:
    """The writer of each piece. A piece is (bytes, the ranks that hold it in rising order); `loads` has the bytes that
    ranks write in any case, and is added to."""
    loads = {} if loads is None else loads
    bundle_of: dict[tuple[int, ...], int] = {}
    # (bytes, pieces, holders)
    units: list[tuple[int, int, tuple[int, ...]]] = []
    unit_of: list[int] = []
    for size, holders in pieces:
        if size < SMALL_BYTES:
            at = bundle_of.get(holders)
            if at is not None:
                held, count, _ = units[at]
                if held < BUNDLE_BYTES and count < BUNDLE_PIECES:
                    units[at] = (held + size, count + 1, holders)
                    unit_of.append(at)
                    continue
            bundle_of[holders] = len(units)
        unit_of.append(len(units))
        units.append((size, 1, holders))
    chosen = [0] * len(units)
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    order = sorted(range(len(units)), key=lambda at: (len(units[at][2]) > 1, -units[at][0], at))
    for at in order:
        size, _, holders = units[at]
        heap = heaps.get(holders)
        if heap is None:
            heap = heaps[holders] = [(loads.get(rank, 0), rank) for rank in holders]
            heapq.heapify(heap)
        rank = _lightest(heap, loads)
        chosen[at] = rank
        loads[rank] = loads.get(rank, 0) + size
        heapq.heapreplace(heap, (loads[rank], rank))
    return [chosen[at] for at in unit_of]


def _lightest(heap: list[tuple[int, int]], loads: dict[int, int]) -> int:
    """The rank at the top of the heap, once what is written there is true."""
    while True:
        seen, rank = heap[0]
        now = loads.get(rank, 0)
        if seen == now:
            return rank
        # It got something through other holders: back in, with what it has now.
        heapq.heapreplace(heap, (now, rank))
