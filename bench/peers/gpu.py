"""The driver's own view of device memory, through NVML, from outside the process that loads.

An extra load at the end of a runner's first visit is watched this way (and is in no median), so
that what a loader takes beyond its outputs shows even where torch's allocator does not know of it.
"""

from __future__ import annotations

import ctypes
import time


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Nvml:
    """One GPU. Raises OSError where the library is missing or refuses."""

    def __init__(self, index: int):
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index),
                   ctypes.byref(self.handle))

    def _call(self, name: str, *arguments) -> None:
        if (rc := getattr(self.lib, name)(*arguments)) != 0:
            raise OSError(f"{name} failed with {rc}")

    def used_bytes(self) -> int:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self.handle, ctypes.byref(memory))
        return memory.used


class PeakWatch:
    """Call it often: it keeps the peaks of device memory and of the worker's host memory."""

    def __init__(self, nvml: Nvml | None, pid: int):
        self.nvml, self.pid = nvml, pid
        self.start = nvml.used_bytes() if nvml else None
        self.peak_used, self.peaks, self.samples, self.last = self.start or 0, {}, 0, 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self.last < 0.002:
            return
        self.last, self.samples = now, self.samples + 1
        if self.nvml:
            self.peak_used = max(self.peak_used, self.nvml.used_bytes())
        for key, value in _status(self.pid).items():
            self.peaks[key] = max(value, self.peaks.get(key, 0))

    def result(self) -> dict:
        return {"samples": self.samples, "host_peaks": self.peaks,
                "device_used_before": self.start, "device_used_peak": self.peak_used or None}


def _status(pid: int) -> dict[str, int]:
    wanted = ("RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")
    try:
        with open(f"/proc/{pid}/status") as file:
            fields = (line.split() for line in file)
            return {f[0][:-1]: int(f[1]) * 1024 for f in fields if f[0][:-1] in wanted}
    except OSError:
        return {}
