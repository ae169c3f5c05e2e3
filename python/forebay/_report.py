"""What the last load did."""

from __future__ import annotations

import threading
from typing import Any

_local = threading.local()

Report = dict[str, Any]

#: Numbers that add up over the parts of one load.
_SUMS = (
    "bytes",
    "read_bytes",
    "seconds",
    "cpu_seconds",
    "verified_gpu_bytes",
    "verified_cpu_bytes",
    "unverified_bytes",
)
_PEAKS = (
    "threads",
    "arena_limit_bytes",
    "arena_touched_bytes",
    "arena_peak_bytes",
    "registered_peak_bytes",
    "registered_limit_bytes",
    "files_unchanged",
)


def last_report() -> Report | None:
    """The report of the last load that this thread finished, `None` before the first.

    - `bytes`, `seconds`, `gb_per_s`: payload, time from the first read to the last byte in place, and their ratio;
      `read_bytes` counts gaps that were read and thrown away too; `total_seconds` is the whole call.
    - `open_seconds`: opening files and checking headers. `allocation_seconds`: time in the framework's allocator, which
      overlaps the transfers.
    - `cpu_seconds`, `threads`: of the worker threads.
    - `paths`: for each path its `bytes`, `pieces` and `reasons`. `refusals`: what was refused and what was done instead.
    - `verified_gpu_bytes`, `verified_cpu_bytes`: of blocks with checksums that were right, compared by the GPU in its
      memory and by the CPU on their way. `unverified_bytes`: payload that there was nothing to compare with.
    - `arena_limit_bytes`, `arena_touched_bytes`, `arena_peak_bytes`: the pinned staging memory.
      `registered_peak_bytes`, `registered_limit_bytes`: page cache registered with the GPU. Peaks are those of the
      engine, which is kept between loads. `registered_left_bytes` were still registered when the load returned: their
      release goes on in the background, for some tenths of a second.
    - `device`, `format`, `files`, `tensors`; `cast_tensors` went through memory of at most `cast_window_bytes`.
    - `verified`, `not_verified`: lines of text. `warnings`: what was accepted but is worth telling.
    """
    return getattr(_local, "report", None)


def remember(report: Report) -> None:
    """Makes `report` the last one of this thread."""
    _local.report = report


def unverified(format_name: str, count: int) -> str:
    """Why so many bytes of a format could not be compared with anything."""
    if format_name.startswith("safetensors"):
        return f"{count} bytes: safetensors has no checksums"
    return (
        f"{count} bytes: they are parts of records that were not read whole, and the checksum (CRC-32) that the "
        "archive has of a record is of all of it"
    )


def merged(parts: list[Report]) -> Report:
    """One report for the sessions of one load."""
    if len(parts) == 1:
        return dict(parts[0])
    total: Report = dict.fromkeys(_SUMS, 0) | dict.fromkeys(_PEAKS, 0)
    total |= {"paths": {}, "refusals": []}
    for part in parts:
        for key in _SUMS:
            total[key] += part.get(key, 0)
        for key in _PEAKS:
            total[key] = max(total[key], part[key])
        for path, share in part["paths"].items():
            into = total["paths"].setdefault(path, {"bytes": 0, "pieces": 0, "reasons": []})
            into["bytes"] += share["bytes"]
            into["pieces"] += share["pieces"]
            into["reasons"] += [line for line in share["reasons"] if line not in into["reasons"]]
        total["refusals"] += [line for line in part["refusals"] if line not in total["refusals"]]
    seconds = total["seconds"]
    total["registered_left_bytes"] = parts[-1]["registered_left_bytes"] if parts else 0
    total["gb_per_s"] = total["bytes"] / 1e9 / seconds if seconds > 0 else 0.0
    return total
