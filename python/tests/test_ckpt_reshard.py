"""Restores on other numbers of ranks: what comes back, and what is read for it on one host."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ckpt_cases import harness, reshard
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay._ckpt import nodememory, nodeplan

#: What the files beside the data may count: metadata, manifest, leases, modules imported late; per rank.
BESIDE_BYTES = 1 << 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Step 1, saved by four ranks."""
    directory = str(tmp_path_factory.mktemp("reshard"))
    written = harness.run(reshard.save, 4, directory)
    assert sum(written) == reshard.needed_bytes()
    return directory


def names_left() -> list[str]:
    """Shared memory of restores that has a name."""
    own = f"forebay-restore-{os.geteuid()}-"
    return [name for name in os.listdir(nodememory.FOLDER) if name.startswith(own)]


def none_left() -> bool:
    """Whether all names go; those of other tests at the same time may be there for a moment."""
    until = time.monotonic() + 10
    while names_left() and time.monotonic() < until:
        time.sleep(0.05)
    return not names_left()


def total(reports: list[dict[str, Any]], key: str) -> int:
    return sum(int(report[key]) for report in reports)


@pytest.mark.parametrize("world", [2, 3, 8, 1])
def test_a_host_reads_what_it_needs_once(saved: str, world: int) -> None:
    needed = reshard.needed_bytes()
    for there in (
        harness.run(reshard.restore, world, saved, 1, 10 + world),
        harness.run(reshard.restore, 4, saved, 10 + world),
    ):
        assert needed <= total(there, "read") <= 1.1 * needed
        chars = total(there, "chars")
        assert needed <= chars <= 1.1 * needed + BESIDE_BYTES * len(there)
        assert len(there) == 1 or total(there, "shared") > needed / 4
        if len(there) > 1:
            # The work is spread: nobody reads more than twice its part.
            assert max(one["read"] for one in there) < 2 * needed / len(there)
    assert none_left()


def test_little_memory_takes_rounds_and_reads_no_more(saved: str) -> None:
    reports = harness.run(reshard.restore, 3, saved, 1, None, 1, 16 << 20)
    assert total(reports, "read") <= 1.1 * reshard.needed_bytes()
    assert total(reports, "shared") > 0 and all(one["rounds"] > 1 for one in reports)


def test_without_enough_memory_everyone_reads_apart(saved: str) -> None:
    reports = harness.run(reshard.restore, 4, saved, 1, None, 1, 1 << 20)
    assert total(reports, "shared") == 0
    assert total(reports, "read") > 1.1 * reshard.needed_bytes()
    for bad in (0, 2):
        reports = harness.run(reshard.without_memory, 4, saved, bad)
        assert total(reports, "shared") == 0
    assert none_left()


def test_hosts_share_nothing_with_one_another(saved: str) -> None:
    reports = harness.run(reshard.restore, 2, saved, 1, None, 2)
    assert total(reports, "shared") == 0
    # Two ranks on each of two hosts: each host reads once what its own ranks need, all but halves of what is cut.
    reports = harness.run(reshard.restore, 4, saved, 1, None, 2)
    assert all(report["shared"] > 0 for report in reports)
    alone = harness.run(reshard.restore, 4, saved, 1, None, 4)
    assert total(alone, "shared") == 0
    assert total(reports, "read") < 0.8 * total(alone, "read")


def test_little_is_not_shared(tmp_path: Path) -> None:
    assert harness.run(reshard.small, 2, str(tmp_path)) == [(0, 4000), (0, 4000)]


def test_odd_memory_is_filled(saved: str) -> None:
    assert min(harness.run(reshard.on_device, 2, saved, "cpu")) > 0


@pytest.mark.gpu
def test_memory_of_a_gpu_is_filled(saved: str) -> None:
    assert min(harness.run(reshard.on_device, 2, saved, "cuda:0")) > 0


@pytest.mark.parametrize(("bad", "nth"), [(1, 1), (0, 2)])
def test_what_one_rank_cannot_read_all_raise(saved: str, bad: int, nth: int) -> None:
    for code, what, seconds in harness.run(reshard.fail, 4, saved, bad, nth):
        assert code == "checksum" and what == f"rank {bad}: the disk is broken"
        assert seconds < 20
    assert none_left()


def test_what_one_rank_cannot_copy_all_raise(saved: str) -> None:
    whats = harness.run(reshard.fail_to_copy, 4, saved, 2)
    other = "rank 2: restoring failed: MemoryError: no memory on the device"
    assert whats == [other, other, "own: no memory on the device", other]
    assert none_left()


def test_memory_that_a_killed_rank_left_is_removed() -> None:
    mine = nodememory.create(4096)
    try:
        harness.run(reshard.die_making, 1, store=False)
        left = [name for name in names_left() if name != mine.place[0]]
        assert left, "the test needs something that is left"
        other = nodememory.create(4096)
        assert not set(left) & set(names_left())
        # Their maker lives.
        assert {mine.place[0], other.place[0]} <= set(names_left())
        other.unlink()
        seen = nodememory.attach(mine.place)
        mine.data[5] = 17
        assert seen.data[5] == 17
        with pytest.raises(OSError, match="another file"):
            nodememory.attach([*mine.place[:3], 8192])
        with pytest.raises(OSError, match="not shared memory"):
            nodememory.attach(["../../etc/passwd", *mine.place[1:]])
    finally:
        mine.unlink()
    assert mine.place[0] not in names_left()
    with pytest.raises(FileNotFoundError):
        nodememory.attach(mine.place)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[list[Any], list[list[Any]]]:
    """Chunks that make up a small tensor, and wants of a few ranks."""
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=3))
    cuts = [sorted(draw(st.sets(st.integers(1, side), max_size=2)) | {0, side}) for side in shape]
    chunks: list[Any] = [((), ())]
    for marks in cuts:
        spans = list(zip(marks, marks[1:], strict=False))
        chunks = [
            ((*offsets, low), (*sizes, high - low))
            for offsets, sizes in chunks
            for low, high in spans
        ]
    wants = []
    for _ in range(draw(st.integers(1, 4))):
        regions = []
        for _ in range(draw(st.integers(0, 2))):
            low = [draw(st.integers(0, side - 1)) for side in shape]
            sides = zip(low, shape, strict=True)
            sizes = [draw(st.integers(1, side - start)) for start, side in sides]
            regions.append((tuple(low), tuple(sizes)))
        wants.append(regions)
    return chunks, wants


def _slices(region: Any) -> tuple[slice, ...]:
    return tuple(slice(low, low + side) for low, side in zip(*region, strict=True))


@settings(max_examples=300, deadline=None)
@given(cut_tensors(), st.sampled_from([1, 2, 4]), st.integers(1, 200), st.sampled_from([8, 64]))
def test_parts_and_the_rest_are_all_that_is_wanted(
    case: tuple[list[Any], list[list[Any]]], itemsize: int, limit: int, block: int
) -> None:
    chunks, wants = case
    shape = [max(low + side for low, side in zip(*dims, strict=True)) for dims in _by_dim(chunks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodeplan, "BLOCK_BYTES", block)
        parts = nodeplan.parts(chunks, itemsize, wants)
        units = [unit for one in parts for unit in nodeplan.units(0, one, itemsize, limit)]
    together = torch.zeros(shape, dtype=torch.int32)
    for unit in units:
        together[_slices(unit.region)] += 1
        count = torch.Size(unit.region[1]).numel()
        assert unit.bytes == count * itemsize and (unit.bytes <= limit or count == 1)
    assert bool((together <= 1).all()), "nothing is read twice"
    several = torch.zeros(shape, dtype=torch.int32)
    for regions in wants:
        own = torch.zeros(shape, dtype=torch.int32)
        for want in regions:
            own[_slices(want)] = 1
            inside = [one for one in parts if nodeplan.overlap(one.region, want)]
            rest = nodeplan.outside(want, [one.chunk for one in inside])
            filled = torch.zeros(shape, dtype=torch.int32)
            for region in rest:
                filled[_slices(region)] += 1
            for unit in units:
                both = nodeplan.overlap(unit.region, want)
                if both is not None:
                    filled[_slices(both)] += 1
            expected = torch.zeros(shape, dtype=torch.int32)
            expected[_slices(want)] = 1
            assert torch.equal(filled, expected), "each element once, from one place"
        several += own
    if parts:
        assert int(several.max()) <= len(wants) and int(together.sum()) > 0


def _by_dim(chunks: list[Any]) -> list[tuple[list[int], list[int]]]:
    dims = len(chunks[0][0])
    return [
        ([one[0][dim] for one in chunks], [one[1][dim] for one in chunks]) for dim in range(dims)
    ]


def test_what_no_chunk_holds_is_left_to_the_reader() -> None:
    want = ((0, 0), (4, 4))
    assert nodeplan.parts([want], 4, [[want], [want]]) == [nodeplan.Part(want, want)]
    assert nodeplan.parts([((0, 0), (4, 3))], 4, [[want], [want]]) == []


def test_rows_that_few_need_are_not_read_with_those_that_many_need() -> None:
    # 64 MiB in rows of 1 MiB: two ranks want the first eight rows, one the last eight.
    chunk = ((0, 0), (64, 1 << 20))
    low, high = ((0, 0), (8, 1 << 20)), ((56, 0), (8, 1 << 20))
    assert nodeplan.parts([chunk], 1, [[low], [low], [high]]) == [nodeplan.Part(chunk, low)]
    # Rows that ranks have side by side are read by each for itself: one block in 64 is not worth a copy.
    halves = [[((0, 0), (32, 1 << 20))], [((32, 0), (32, 1 << 20))]]
    assert nodeplan.parts([chunk], 1, halves) == []
    # Columns cost every rank the whole rows.
    columns = [[((0, at << 16), (64, 1 << 16))] for at in range(16)]
    assert nodeplan.parts([chunk], 1, columns) == [nodeplan.Part(chunk, chunk)]


def test_rounds_fit_and_spread_the_work() -> None:
    wide = ((0, 0), (3000, 12345))
    found = {0: [nodeplan.Part(wide, wide)]}
    found |= {one: [nodeplan.Part(((0,), (one,)), ((0,), (one,)))] for one in range(1, 500)}
    capacity = 32 << 20
    rounds = nodeplan.rounds(found, lambda _: 4, 8, capacity)
    assert len(rounds) > 4
    seen = 0
    for turn in rounds:
        end = 0
        loads = [0] * 8
        for placed in turn:
            assert placed.start >= end and placed.start % 64 == 0
            end = placed.start + placed.unit.bytes
            loads[placed.reader] += placed.unit.bytes
            seen += placed.unit.bytes
        assert end <= capacity
        assert max(loads) - min(loads) <= 2 * max(one.unit.bytes for one in turn)
    assert seen == 4 * (3000 * 12345 + sum(range(500)))
