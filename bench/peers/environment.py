"""What the run ran on, for the JSON: enough to judge a figure later, nothing that names anyone."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from pathlib import Path

GPU_FIELDS = ("name", "driver_version", "memory.total", "pcie.link.gen.current",
              "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")


def without_folders(words: list[str]) -> str:
    """A command as one line, its files and folders by their last names: also those behind a `=`."""
    def short(word: str) -> str:
        name, equals, value = word.rpartition("=")
        return name + equals + (Path(value).name if value.startswith("/") else value)
    return " ".join([Path(words[0]).name] + [short(word) for word in words[1:]])


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def cpu_model() -> str | None:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def cores() -> int:
    return len(os.sched_getaffinity(0))


def memory() -> dict:
    fields = (line.split() for line in (_read("/proc/meminfo") or "").splitlines())
    wanted = ("MemTotal:", "MemAvailable:", "Cached:", "SwapTotal:")
    return {f[0][:-1]: int(f[1]) * 1024 for f in fields if f[0] in wanted}


def gpus() -> list[dict]:
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(GPU_FIELDS, (v.strip() for v in line.split(",")))) for line in
            found.splitlines()]


def file_system(path: Path) -> dict:
    """Type, mount options and block device settings of where the model lies."""
    real, best = str(path.resolve()), None
    for line in (_read("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()
        point = mount[4]
        if real == point or real.startswith(point.rstrip("/") + "/"):
            if best is None or len(point) >= len(best[0]):
                best = (point, mount[2], right.split()[0], mount[5])
    if best is None:
        return {}
    out = {"type": best[2], "options": best[3]}
    queue = f"/sys/dev/block/{best[1]}/queue"
    if not os.path.isdir(queue):
        queue = f"/sys/dev/block/{best[1]}/../queue"
    for key in ("read_ahead_kb", "scheduler", "nr_requests", "max_sectors_kb", "rotational"):
        if (value := _read(f"{queue}/{key}")) is not None:
            out[key] = value
    return out


def gather(model: Path) -> dict:
    return {
        "cpu": cpu_model(), "cores": cores(), "machine": platform.machine(),
        "kernel": platform.release(), "cgroup_cpu_max": _read("/sys/fs/cgroup/cpu.max"),
        "memory": memory(), "page_bytes": os.sysconf("SC_PAGE_SIZE"),
        "transparent_hugepage": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "io_uring_disabled": _read("/proc/sys/kernel/io_uring_disabled"),
        "memlock_limits": [str(v) for v in resource.getrlimit(resource.RLIMIT_MEMLOCK)],
        "root": os.geteuid() == 0, "gpus": gpus(), "file_system": file_system(model),
        "python": platform.python_version(), "load_average": os.getloadavg(),
    }
