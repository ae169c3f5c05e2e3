#!/usr/bin/env python3
"""Listing very many checkpoints: `forebay ckpt list` on a root of 10,000 committed steps, and the system calls it makes.

    python bench/host/list_steps.py --forebay target/release/forebay [--steps 10000] [--dir FOLDER] [--repeats 5]

One step is really saved by `forebay.Checkpointer`; the others are folders of hard links to its files, so each costs a
listing what a real one does: its folders, `.metadata`, the record of its commit. The page cache is warm, as it is where
a runner looks every few seconds. Best, median and worst wall time, CPU seconds, and where strace is there the calls of
each step. Exit code 1 where the median is a second or more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

#: Seconds that the listing of 10,000 steps may take.
TARGET = 1.0


def make(root: Path, steps: int) -> None:
    """A root of many steps."""
    import torch

    import forebay

    with forebay.Checkpointer(str(root)) as checkpoints:
        checkpoints.save(1, {"w": torch.randn(100, 100), "b": torch.randn(10)}, blocking=True)
    first = root / "step-1"
    inside = sorted(path.relative_to(first) for path in first.rglob("*"))
    for step in range(2, steps + 1):
        folder = root / f"step-{step}"
        folder.mkdir()
        for path in inside:
            if (first / path).is_dir():
                (folder / path).mkdir()
            else:
                os.link(first / path, folder / path)


def calls(command: list[str], steps: int) -> float | None:
    """System calls of each step, by strace."""
    if shutil.which("strace") is None:
        return None
    with tempfile.NamedTemporaryFile("r") as log:
        subprocess.run(
            ["strace", "-f", "-c", "-o", log.name, *command], check=True, stdout=subprocess.DEVNULL
        )
        total = re.search(r"^\S+\s+\S+\s+\S*\s+(\d+)\s+\S*\s*total$", log.read(), re.MULTILINE)
    return int(total.group(1)) / steps if total else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forebay", default="forebay", help="the command")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument(
        "--dir", type=Path, help="where the root is made [default: a temporary folder]"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        root = Path(folder) / "root"
        make(root, args.steps)
        command = [args.forebay, "ckpt", "list", "--json", str(root)]
        walls: list[float] = []
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(args.repeats):
            start = perf_counter()
            listed = subprocess.run(command, check=True, capture_output=True).stdout
            walls.append(perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert len(json.loads(listed)["steps"]) == args.steps
        cpu = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / args.repeats
        result = {
            "steps": args.steps,
            "seconds": [min(walls), statistics.median(walls), max(walls)],
            "cpu_seconds": cpu,
            "calls_per_step": calls(command, args.steps),
        }
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result) + "\n")
    return int(result["seconds"][1] >= TARGET * args.steps / 10_000)


if __name__ == "__main__":
    sys.exit(main())
