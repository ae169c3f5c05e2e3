"""Who writes what several ranks hold, and the frames in which ranks tell."""

from __future__ import annotations

import random
import struct
import zlib

import pytest

import forebay
from forebay._ckpt import frames
from forebay._ckpt.share import SMALL_BYTES, assign

MB = 1 << 20


def test_replicated_tensors_are_balanced_by_bytes() -> None:
    sizes = [random.Random(1).randint(1, 100) * MB for _ in range(200)]
    everyone = (0, 1, 2, 3)
    loads: dict[int, int] = {}
    writers = assign([(size, everyone) for size in sizes], loads)
    assert set(writers) == set(everyone)
    assert max(loads.values()) < 1.05 * sum(sizes) / 4
    assert assign([(size, everyone) for size in sizes]) == writers


def test_what_one_rank_holds_alone_counts_first() -> None:
    loads = {0: 100 * MB}
    writers = assign([(10 * MB, (0, 1)) for _ in range(10)], loads)
    assert writers == [1] * 10


def test_small_ones_stay_together() -> None:
    pieces = [(64, (0, 1, 2, 3))] * 20_000 + [(50 * MB, (0, 1, 2, 3))] * 4
    writers = assign(pieces)
    assert len(set(writers[:20_000])) == 1
    assert sorted(writers[20_000:]) == [0, 1, 2, 3]


def test_many_small_ones_are_several_bundles() -> None:
    pieces = [(SMALL_BYTES - 1, (0, 1))] * 2000
    loads: dict[int, int] = {}
    assign(pieces, loads)
    assert abs(loads[0] - loads[1]) <= 32 * MB


def test_ranks_that_overlap_in_part_are_balanced_over_all() -> None:
    pieces = [(MB, (0, 1))] * 40 + [(MB, (1, 2))] * 40 + [(MB, (0, 1, 2, 3))] * 40
    loads: dict[int, int] = {}
    writers = assign(pieces, loads)
    assert all(writer in holders for writer, (_, holders) in zip(writers, pieces, strict=True))
    assert max(loads.values()) <= 41 * MB and sum(loads.values()) == 120 * MB


def test_a_message_comes_back() -> None:
    message = {"a": [1, 2, "x"], "b": None}
    head, body = frames.encode(message)
    assert len(head) == frames.HEAD_BYTES
    assert frames.decode(head, body.ljust(200, b"\0"), "rank 1") == message


def test_a_damaged_length_is_an_error_and_no_allocation() -> None:
    head, body = frames.encode({"keys": ["a"] * 10})
    for bit in range(len(head) * 8):
        damaged = bytearray(head)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(forebay.ChecksumError, match="rank 3"):
            frames.body_bytes(bytes(damaged), "rank 3")
    # A head that is whole, but claims an exabyte.
    fields = struct.pack("<4sIQI", b"FBRK", 1, 1 << 60, 0)
    claims = fields + struct.pack("<I", zlib.crc32(fields))
    with pytest.raises(forebay.ChecksumError):
        frames.body_bytes(claims, "rank 3")


def test_a_damaged_body_is_an_error() -> None:
    head, body = frames.encode({"keys": list(range(100))})
    for at in range(len(body)):
        damaged = bytearray(body)
        damaged[at] ^= 0x10
        with pytest.raises(forebay.ChecksumError):
            frames.decode(head, bytes(damaged), "rank 0")
    with pytest.raises(forebay.ChecksumError):
        frames.decode(head, body[:-1], "rank 0")


def test_a_message_of_another_version_says_so() -> None:
    fields = struct.pack("<4sIQI", b"FBRK", 9, 3, 0)
    head = fields + struct.pack("<I", zlib.crc32(fields))
    with pytest.raises(forebay.UnsupportedError, match="version 9"):
        frames.body_bytes(head, "rank 1")
