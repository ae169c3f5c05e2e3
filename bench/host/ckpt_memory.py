#!/usr/bin/env python3
"""Memory over 200 saves: it must be that of the first few.

    python bench/host/ckpt_memory.py [--dir FOLDER] [--saves 200] [--mb 48] [--out FILE]

Saves a state over and over, in the background, through a staging pool smaller than the state, each step twice (so that
every other save is an overwrite), with other values each time. After every save, when it is committed: resident memory of
the process, memory of the pool in use at most and in all, threads, open files, objects that Python's collector knows.

The exit code is 1 if resident memory grows by more than `--slack-mb` between the saves after the warm-up (the first fifth)
and the last fifth (medians of both), if the pool was ever over its size, or if threads, files or objects add up.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import forebay
import torch
from forebay import _native

POOL_BYTES = 16 << 20

#: A slot of 4 MiB has a margin of 128 KiB, which the pool's size does not count and its use does.
POOL_MARGIN = 1 + 1 / 32

#: What is collected on the way, so that the disk does not fill with what was overwritten.
COLLECT_EVERY = 40


def resident() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def pools(checkpoints: forebay.Checkpointer) -> list[Any]:
    """The staging pools; there is no public way to them."""
    run = checkpoints._run
    return [] if run is None else [run.natives.pool("host")]


def look(checkpoints: forebay.Checkpointer) -> dict[str, int]:
    made = pools(checkpoints)
    return {
        "rss": resident(),
        "pool_peak": max((pool.peak_bytes for pool in made), default=0),
        "pool_touched": sum(pool.touched_bytes for pool in made),
        "pool_size": sum(pool.bytes for pool in made),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }


def measure(folder: Path, saves: int, megabytes: int) -> list[dict[str, int]]:
    large = [torch.zeros(1 << 20) for _ in range(megabytes // 4)]
    small = {f"small{number}": torch.zeros(16) for number in range(2000)}
    state = {"large": large, "small": small, "step": 0, "words": ["a", "b"]}
    seen = []
    with forebay.Checkpointer(folder, staging_bytes=POOL_BYTES, keep_last=2) as checkpoints:
        for number in range(saves):
            for tensor in large:
                tensor.fill_(number)
            state["step"] = number
            state["words"] = [str(number)] * 10
            began = perf_counter()
            handle = checkpoints.save(number // 2, state)
            handle.wait()
            took = perf_counter() - began
            del handle
            gc.collect()
            seen.append({**look(checkpoints), "milliseconds": int(took * 1000)})
            if number % COLLECT_EVERY == COLLECT_EVERY - 1:
                checkpoints.prune(keep_last=1, grace_s=0)
    return seen


def judge(seen: list[dict[str, int]], slack_bytes: int) -> list[str]:
    fifth = max(len(seen) // 5, 1)
    early, late = seen[fifth:2 * fifth], seen[-fifth:]

    def grown(key: str) -> float:
        return statistics.median(one[key] for one in late) - \
            statistics.median(one[key] for one in early)

    faults = []
    if grown("rss") > slack_bytes:
        faults.append(f"resident memory grew by {grown('rss') / 1e6:.1f} MB")
    # A thread that is about to end, a file that is about to be closed.
    for key, slack in (("threads", 2), ("files", 2), ("objects", len(seen) // 2)):
        if grown(key) > slack:
            faults.append(f"{key} grew by {grown(key):.0f}")
    over = [one for one in seen if one["pool_peak"] > one["pool_size"] * POOL_MARGIN]
    if over:
        faults.append(f"the pool had {over[0]['pool_peak']} bytes out of {over[0]['pool_size']}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--mb", type=int, default=48, help="of the state, in tensors of 4 MiB")
    parser.add_argument("--slack-mb", type=float, default=4.0)
    parser.add_argument("--out", help="JSON of every save")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckpt-memory-", dir=arguments.dir))
    try:
        seen = measure(folder, arguments.saves, arguments.mb)
        steps = [one for one in _native.steps(folder) if one["state"] == "committed"]
        assert steps and steps[-1]["step"] == (arguments.saves - 1) // 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(seen, indent=1))
    print(f"{'save':>5}{'RSS MB':>9}{'pool':>7}{'peak':>7}{'threads':>9}{'files':>7}"
          f"{'objects':>9}{'ms':>7}")
    for number, one in enumerate(seen):
        if number < 3 or number % (len(seen) // 10 or 1) == 0 or number == len(seen) - 1:
            print(f"{number:>5}{one['rss'] / 1e6:>9.1f}{one['pool_touched'] / 1e6:>7.1f}"
                  f"{one['pool_peak'] / 1e6:>7.1f}{one['threads']:>9}{one['files']:>7}"
                  f"{one['objects']:>9}{one['milliseconds']:>7}")
    faults = judge(seen, int(arguments.slack_mb * 1e6))
    print("\n".join(faults) or "memory, threads and files stay the same")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
