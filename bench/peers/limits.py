"""What the hardware gives, measured in the same run as the loaders.

- link: pinned host memory to the GPU, one stream and two;
- disk: O_DIRECT reads of the model's own files, a few threads, 1 or 8 MiB a read;
- memory: copies within the host, and `pread` out of the page cache, with one thread and with all.

The link and the disk can also run as runners (`raw-link`, `raw-disk`) between the loaders, so that
a drift of the machine shows in them as well.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LINK_BYTES = 1 << 30
READ_BYTES = 8 << 20


# Link ----------------------------------------------------------------------------------------


class Link:
    """One pinned buffer and one device buffer, copied over and over."""

    def __init__(self, device: str, nbytes: int = LINK_BYTES):
        import torch

        self.torch, self.device, self.nbytes = torch, device, nbytes
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.host.random_(0, 255)
        self.gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        torch.cuda.synchronize()

    def copy(self, total_bytes: int, streams: int = 1) -> float:
        """Seconds for `total_bytes` to arrive."""
        torch, part = self.torch, self.nbytes // streams
        torch.cuda.synchronize()
        start, sent = time.perf_counter(), 0
        while sent < total_bytes:
            for i in range(streams):
                nbytes = min(part, total_bytes - sent)
                with torch.cuda.stream(self.streams[i]):
                    self.gpu[i * part : i * part + nbytes].copy_(
                        self.host[i * part : i * part + nbytes], non_blocking=True)
                sent += nbytes
                if sent >= total_bytes:
                    break
        torch.cuda.synchronize()
        return time.perf_counter() - start


def link(device: str, repeats: int = 5) -> dict:
    with_buffer = Link(device)
    total = 4 * LINK_BYTES
    with_buffer.copy(total)
    rates = {
        f"streams_{n}": [total / with_buffer.copy(total, n) / 1e9 for _ in range(repeats)]
        for n in (1, 2)
    }
    how = f"pinned 1 GiB to {device}, 4 GiB a try, best of {repeats}, with 1 or 2 streams"
    return {"gb_per_s": max(max(r) for r in rates.values()), "rates": rates, "how": how}


# Disk ----------------------------------------------------------------------------------------


def read_files(paths: list[Path], threads: int, seconds: float | None = None,
               direct: bool = True, read_bytes: int = READ_BYTES) -> tuple[int, float]:
    """Reads the files with `threads` readers, in file order. Returns bytes and seconds."""
    jobs = []
    for path in paths:
        size = path.stat().st_size
        jobs += [(path, at) for at in range(0, size, read_bytes)]
    fds = {path: os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0)) for path in paths}
    lock, state = threading.Lock(), {"next": 0, "bytes": 0}
    until = time.perf_counter() + (seconds or 1e9)

    def reader(_):
        buffer, done = mmap.mmap(-1, read_bytes), 0
        try:
            while time.perf_counter() < until:
                with lock:
                    at, state["next"] = state["next"], state["next"] + 1
                if at >= len(jobs):
                    break
                path, offset = jobs[at]
                done += os.preadv(fds[path], [buffer], offset)
        finally:
            with lock:
                state["bytes"] += done

    start = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(reader, range(threads)))
    finally:
        for fd in fds.values():
            os.close(fd)
    return state["bytes"], time.perf_counter() - start


DISK_TRIES = ((4, 1 << 20), (4, 8 << 20), (8, 8 << 20), (16, 8 << 20))


def disk(paths: list[Path], seconds: float = 3.0, tries=DISK_TRIES) -> dict:
    """The best O_DIRECT rate over a few depths. The caller has dropped the page cache."""
    tried = {}
    for threads, read_bytes in tries:
        nbytes, took = read_files(paths, threads, seconds, read_bytes=read_bytes)
        tried[f"{threads} x {read_bytes >> 20} MiB"] = nbytes / took / 1e9
    best = max(tried, key=tried.get)
    return {"gb_per_s": tried[best], "best": best, "rates": tried,
            "how": f"O_DIRECT, sequential over the model's files, {seconds:g} s a try, the best"}


# Memory --------------------------------------------------------------------------------------


def _parallel(work, threads: int, repeats: int = 3) -> float:
    best = 1e9
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            start = time.perf_counter()
            list(pool.map(work, range(threads)))
            best = min(best, time.perf_counter() - start)
    return best


def memory(paths: list[Path], cores: int) -> dict:
    """Copies within the host; and `pread` of the model's first bytes from the page cache."""
    import numpy as np

    each = 64 << 20
    out = {}
    for threads in sorted({1, max(1, cores // 2), cores}):
        source = [np.full(each, i, dtype=np.uint8) for i in range(threads)]
        target = [np.full(each, 0, dtype=np.uint8) for _ in range(threads)]
        took = _parallel(lambda i: [np.copyto(target[i], source[i]) for _ in range(4)], threads)
        out[f"memcpy_{threads}"] = 4 * each * threads / took / 1e9
        del source, target
    fd = os.open(paths[0], os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        for threads in sorted({1, max(1, cores // 2), cores}):
            buffers = [bytearray(READ_BYTES) for _ in range(threads)]
            share = min(256 << 20, size // threads)

            def read(i):
                for at in range(0, share, READ_BYTES):
                    view = memoryview(buffers[i])[: min(READ_BYTES, share - at)]
                    os.preadv(fd, [view], i * share + at)

            os.posix_fadvise(fd, 0, share * threads, os.POSIX_FADV_WILLNEED)
            out[f"pread_cached_{threads}"] = share * threads / _parallel(read, threads) / 1e9
    finally:
        os.close(fd)
    return {"gb_per_s": out, "how": "memcpy: 64 MiB blocks; pread: 8 MiB into a reused buffer"}
