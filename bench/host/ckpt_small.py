#!/usr/bin/env python3
"""Checkpoints of very many very small tensors: 20,000 of 64 bytes, on the CPU, fsync included.

    taskset -c 0,1 python bench/host/ckpt_small.py [--dir FOLDER] [--repeats 5] [--out FILE] [--profile FILE]

Three runners take turns: `Checkpointer`; `dcp.save` and `dcp.load` with `forebay.dcp.Writer` and `Reader`; the same with
torch's own. Each visit is a fork of a process that has imported everything and used nothing, and does: first save, second
save (another step, other values), load into zeros, comparison of every tensor. So "first" has all that a first save must
make (threads, memory, plans), and no import.

For each the wall time until the step is durable and committed, the CPU time of the process (all its threads), and for
`dcp.save` the share of the storage writer: what its own methods took, the calls back into torch's planner for each tensor
included. What is held against a target is the median of all visits; best and worst are printed beside it, and CPU time:
on a busy machine wall times say little, and a best of many says nothing of what a job gets.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import forebay
import forebay._ckpt.checkpointer
import forebay.dcp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))
import environment  # noqa: E402

#: Seconds that each phase of `Checkpointer` may take.
TARGETS = {"first": 0.6, "second": 0.3, "load": 0.3}


def state_of(count: int, size: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of `size` bytes, each with memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(count, size // 4, generator=generator)
    return {f"layers.{number}.weight": whole[number].clone() for number in range(count)}


class Timed:
    """Wall and CPU seconds of a phase, and its profile where one is asked for."""

    def __init__(self, profile: bool) -> None:
        self.phases: dict[str, dict[str, float]] = {}
        self.profiles: dict[str, cProfile.Profile] = {}
        self._profile = profile

    def run(self, phase: str, work: Callable[[], dict[str, float] | None]) -> None:
        profile = cProfile.Profile() if self._profile else None
        cpu, wall = process_time(), perf_counter()
        more = profile.runcall(work) if profile else work()
        wall, cpu = perf_counter() - wall, process_time() - cpu
        self.phases[phase] = {"wall": wall, "cpu": cpu, **(more or {})}
        if profile:
            self.profiles[phase] = profile


def with_checkpointer(folder: Path, states: list[dict], into: dict, timed: Timed) -> None:
    checkpoints = forebay.Checkpointer(folder)

    def save(step: int) -> dict[str, float]:
        handle = checkpoints.save(step, states[step])
        report = handle.result()
        return {name: report[name] for name in ("stall_seconds", "plan_seconds", "cpu_seconds",
                                                "durable_seconds", "commit_seconds")}

    timed.run("first", lambda: save(0))
    timed.run("second", lambda: save(1))
    timed.run("load", lambda: drop(checkpoints.restore(into, 1)))
    checkpoints.close()


class Share:
    """Adds up the time inside of some methods of a writer."""

    METHODS = ("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan",
               "write_data", "finish")

    def __init__(self, writer: Any) -> None:
        self.seconds: dict[str, float] = {}
        for name in self.METHODS:
            setattr(writer, name, self._timed(name, getattr(writer, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            began = perf_counter()
            try:
                return method(*arguments, **more)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - began
        return call


def with_dcp(kind: str) -> Callable[[Path, list[dict], dict, Timed], None]:
    def work(folder: Path, states: list[dict], into: dict, timed: Timed) -> None:
        def save(step: int) -> dict[str, float]:
            path = folder / f"step-{step}"
            writer = (forebay.dcp.Writer(path) if kind == "forebay"
                      else dcp.FileSystemWriter(path))
            share = Share(writer)
            dcp.save(states[step], storage_writer=writer, no_dist=True)
            return {"writer_seconds": sum(share.seconds.values()),
                    "write_data_seconds": share.seconds["write_data"],
                    "finish_seconds": share.seconds["finish"]}

        path = folder / "step-1"
        reader = forebay.dcp.Reader(path) if kind == "forebay" else dcp.FileSystemReader(path)
        timed.run("first", lambda: save(0))
        timed.run("second", lambda: save(1))
        timed.run("load", lambda: drop(dcp.load(into, storage_reader=reader, no_dist=True)))
    return work


def drop(_: object) -> None:
    return None


RUNNERS = {"checkpointer": with_checkpointer, "dcp-forebay": with_dcp("forebay"),
           "dcp-stock": with_dcp("stock")}


def visit(name: str, folder: str, count: int, size: int, profile: str | None, answer: Any) -> None:
    """One visit of a runner, in a process of its own."""
    warnings.simplefilter("ignore")
    states = [state_of(count, size, seed) for seed in range(2)]
    into = {key: torch.zeros_like(value) for key, value in states[1].items()}
    timed = Timed(profile is not None)
    RUNNERS[name](Path(folder), states, into, timed)
    wrong = [key for key, value in states[1].items() if not torch.equal(value, into[key])]
    for phase, found in timed.profiles.items():
        with open(f"{profile}.{name}.{phase}.txt", "w") as file:
            pstats.Stats(found, stream=file).sort_stats("cumulative").print_stats(45)
    data = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    answer.send({"phases": timed.phases, "wrong": wrong[:3], "disk_bytes": data})
    answer.close()


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    visits: dict[str, list[dict]] = {name: [] for name in arguments.runners}
    for repeat in range(arguments.repeats):
        # The order rotates, so that nobody always comes after the same.
        order = arguments.runners[repeat % len(arguments.runners):] + \
            arguments.runners[:repeat % len(arguments.runners)]
        for name in order:
            folder = tempfile.mkdtemp(prefix="ckpt-small-", dir=arguments.dir)
            ours, theirs = context.Pipe(duplex=False)
            profile = arguments.profile if repeat == 0 else None
            process = context.Process(target=visit, args=(
                name, folder, arguments.tensors, arguments.bytes, profile, theirs))
            load_before = os.getloadavg()[0]
            process.start()
            theirs.close()
            found = ours.recv()
            process.join()
            shutil.rmtree(folder)
            if found["wrong"] or process.exitcode:
                raise SystemExit(f"{name}: wrong values in {found['wrong']}")
            found["load_average"] = load_before
            found["profiled"] = profile is not None
            visits[name].append(found)
    return {"environment": {"cores": environment.cores(), "cpu": environment.cpu_model(),
                            "torch": torch.__version__, "python": sys.version.split()[0],
                            "file_system": environment.file_system(Path(arguments.dir))},
            "tensors": arguments.tensors, "bytes": arguments.bytes, "targets": TARGETS,
            "visits": visits}


def table(result: dict[str, Any]) -> list[str]:
    lines = [f"{'runner':<14}{'phase':<8}{'wall median':>12}{'best':>8}{'worst':>8}"
             f"{'CPU median':>12}{'best':>8}{'writer':>9}"]
    for name, visits in result["visits"].items():
        counted = [one for one in visits if not one["profiled"]] or visits
        for phase in ("first", "second", "load"):
            def of(key: str, phase: str = phase, counted: list = counted) -> list[float]:
                return [one["phases"][phase][key] for one in counted if key in one["phases"][phase]]
            share = of("writer_seconds")
            lines.append(
                f"{name:<14}{phase:<8}{statistics.median(of('wall')):>12.3f}{min(of('wall')):>8.3f}"
                f"{max(of('wall')):>8.3f}{statistics.median(of('cpu')):>12.3f}{min(of('cpu')):>8.3f}"
                + (f"{statistics.median(share):>9.3f}" if share else ""))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="a folder on the disk")
    parser.add_argument("--runners", type=lambda text: text.split(","), default=list(RUNNERS))
    parser.add_argument("--out", help="JSON of everything")
    parser.add_argument("--profile", help="profile the first visits (not counted) to files that "
                                          "start like this")
    arguments = parser.parse_args()
    result = run(arguments)
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1))
    print("\n".join(table(result)))
    for phase, target in TARGETS.items():
        found = [one["phases"][phase]["wall"] for one in result["visits"].get("checkpointer", [])
                 if not one["profiled"]]
        if found:
            median = statistics.median(found)
            word = "met" if median <= target else "MISSED"
            print(f"checkpointer {phase}: median {median:.3f} s of {len(found)} visits ({min(found):.3f} to "
                  f"{max(found):.3f}), target {target} s: {word}")


if __name__ == "__main__":
    main()
