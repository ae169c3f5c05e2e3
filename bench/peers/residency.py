"""Puts the page cache in a stated condition and proves it.

`cachestat(2)` tells how many pages of a file are cached; where the kernel lacks it or refuses it,
`mincore(2)` is asked, and last a sample of `preadv2(RWF_NOWAIT)`. Which of them answered is kept
with the answer: mincore tells the truth only to the file's owner or writer, and some sandboxes call
every page resident.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SYS_CACHESTAT = 451
READ_BYTES = 4 << 20
WARM_LEAST = 1.0
COLD_MOST = 0.01

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("off", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class _Cachestat(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64)
                for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")]


def _cachestat(fd: int) -> tuple[int, int] | None:
    span, stat = _Range(0, 0), _Cachestat()
    rc = _libc.syscall(SYS_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(stat), 0)
    return (stat.cache, stat.dirty + stat.writeback) if rc == 0 else None


def _mincore(fd: int, nbytes: int) -> int | None:
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                           ctypes.c_int, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    at = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        return None
    try:
        pages = -(-nbytes // mmap.PAGESIZE)
        answer = ctypes.create_string_buffer(pages)
        if _libc.mincore(at, nbytes, answer) != 0:
            return None
        return sum(byte & 1 for byte in answer.raw[:pages])
    finally:
        _libc.munmap(at, nbytes)


def _sampled(fd: int, nbytes: int, samples: int = 1024) -> float | None:
    """Share of pages that can be read without waiting. Only a hint: a hit may start readahead."""
    hits, page = 0, bytearray(1)
    step = max(mmap.PAGESIZE, nbytes // samples)
    offsets = range(0, nbytes, step)
    for offset in offsets:
        try:
            hits += os.preadv(fd, [page], offset, os.RWF_NOWAIT)
        except OSError as err:
            if err.errno != errno.EAGAIN:
                return None
    return hits / len(offsets)


def of_file(path: Path) -> dict:
    """How much of a file is in the page cache: pages, share, and who says so."""
    fd = os.open(path, os.O_RDONLY)
    try:
        nbytes = os.fstat(fd).st_size
        pages = -(-nbytes // mmap.PAGESIZE)
        if (stat := _cachestat(fd)) is not None:
            return {"pages": pages, "resident": stat[0], "dirty": stat[1], "by": "cachestat"}
        if (found := _mincore(fd, nbytes)) is not None:
            return {"pages": pages, "resident": found, "dirty": None, "by": "mincore"}
        share = _sampled(fd, nbytes)
        return {"pages": pages, "resident": None if share is None else round(share * pages),
                "dirty": None, "by": "unknown" if share is None else "sampled"}
    finally:
        os.close(fd)


def of_files(paths: list[Path]) -> dict:
    found = [of_file(path) for path in paths]
    pages = sum(item["pages"] for item in found)
    known = all(item["resident"] is not None for item in found)
    resident = sum(item["resident"] for item in found) if known else None
    return {
        "share": resident / pages if known and pages else None,
        "resident_pages": resident,
        "pages": pages,
        "dirty_pages": sum(item["dirty"] or 0 for item in found),
        "by": "+".join(sorted({item["by"] for item in found})),
    }


def fill(paths: list[Path], threads: int | None = None) -> None:
    """Reads every byte once, so that the kernel caches it."""
    def read(job):
        path, start, end = job
        buffer = bytearray(READ_BYTES)
        fd = os.open(path, os.O_RDONLY)
        try:
            while start < end:
                start += os.preadv(fd, [memoryview(buffer)[: min(READ_BYTES, end - start)]],
                                   start) or end
        finally:
            os.close(fd)

    jobs = []
    for path in paths:
        size = path.stat().st_size
        jobs += [(path, at, min(size, at + (64 << 20))) for at in range(0, size, 64 << 20)]
    with ThreadPoolExecutor(threads or min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(read, jobs))


def drop(paths: list[Path]) -> None:
    """Writes back and evicts the files; as root, the machine's whole page cache as well."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        pass


def right(state: dict, wanted: str) -> bool | None:
    """Is this the condition that was asked for? None: nobody could say."""
    if state["share"] is None:
        return None
    return state["share"] >= WARM_LEAST if wanted == "warm" else state["share"] < COLD_MOST


def enforce(paths: list[Path], wanted: str) -> dict:
    """Makes the condition hold if it does not, and returns what was found right before the run."""
    state = of_files(paths)
    for attempt in range(3):
        if wanted == "cold":
            drop(paths)
        elif right(state, wanted) is True:
            break
        else:
            fill(paths)
        state = of_files(paths)
        if right(state, wanted) is not False:
            break
    return {**state, "wanted": wanted, "right": right(state, wanted)}
