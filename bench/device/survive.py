#!/usr/bin/env python3
"""Saves that outlive their process: what `Checkpointer(survive=True)` costs, and what comes of a process that is killed.

    bench/device/survive.py --forebay target/release/forebay --out results.json --gb 8 [--device cuda:0]

An agent runs beside. `stall`: how long `save` keeps the caller, its first save and later ones, and how long until the
step is committed: with `survive`, and without by a pool as large as the state and by the shadow. `killed`: a process
that is killed with SIGKILL as soon as its save has returned; how long until the agent has committed the step, which is
then compared bit for bit. Folders are in memory (/dev/shm), so that no disk is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt import bytes_of, change, state_of  # noqa: E402
from peers import environment  # noqa: E402

CONFIG = """
[[tier]]
name = "local"
place = "{folder}/none"
[[tier]]
name = "shared"
place = "{folder}/shared"
takes = "pinned"
[agent]
socket = "{folder}/agent.sock"
"""


def options_of(mode: str, socket: str, size: int) -> dict:
    return {
        "survive": {"agent": socket, "survive": True, "shadow": False},
        "pool": {"shadow": False, "staging_bytes": int(size * 1.02)},
        "shadow": {"shadow": True},
    }[mode]


def synchronise(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def stalls(args: argparse.Namespace, mode: str, folder: Path, socket: str) -> dict:
    """One process: saves after each other, each to its end."""
    import forebay

    state = state_of(args.gb, args.device)
    size = bytes_of(state)
    rounds = []
    with forebay.Checkpointer(folder / mode, **options_of(mode, socket, size)) as checkpoints:
        prepared = time.perf_counter()
        checkpoints.prepare(state)
        prepared = time.perf_counter() - prepared
        for step in range(args.rounds + 1):
            change(state, 1)
            synchronise(args.device)
            began = time.perf_counter()
            handle = checkpoints.save(step, state)
            returned = time.perf_counter() - began
            handle.wait()
            report = handle.result()
            rounds.append({"stall_s": returned, "committed_s": time.perf_counter() - began,
                           "snapshot": report["snapshot"]})
    shutil.rmtree(folder / mode)
    later = [one["stall_s"] for one in rounds[1:]]
    return {"mode": mode, "bytes": size, "prepare_s": prepared, "rounds": rounds,
            "first_stall_s": rounds[0]["stall_s"], "stall_s": statistics.median(later),
            "gb_s": size / statistics.median(later) / 1e9}


def dies(args: argparse.Namespace, folder: Path, socket: str) -> None:
    """Saves twice, and is killed when the second has returned."""
    import forebay

    state = state_of(args.gb, args.device)
    checkpoints = forebay.Checkpointer(folder / "killed", agent=socket, survive=True)
    checkpoints.prepare(state)
    checkpoints.save(1, state).wait()
    change(state, 1)
    synchronise(args.device)
    checkpoints.save(2, state)
    print(json.dumps({"at": time.time()}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def killed(args: argparse.Namespace, folder: Path, socket: str) -> dict:
    import forebay
    import torch

    done = worker(args, "dies", folder, socket)
    at = json.loads(done.stdout.splitlines()[-1])["at"]
    commit = folder / "killed" / "step-2" / ".metadata"
    before = commit.exists()
    while not commit.exists():
        if time.time() > at + 120:
            return {"error": "not committed", "told": (folder / "agent.log").read_text()[-2000:]}
        time.sleep(0.005)
    seconds = time.time() - at
    expected, found = state_of(args.gb, args.device), state_of(args.gb, args.device)
    change(expected, 1)
    change(found, 7)
    with forebay.Checkpointer(folder / "killed") as checkpoints:
        step = checkpoints.restore(found).step
    equal = all(torch.equal(expected[name], found[name]) for name in expected)
    return {"committed_before_the_kill": before, "seconds": seconds, "step": step, "equal": equal,
            "exit": done.returncode, "bytes": bytes_of(expected)}


def worker(args: argparse.Namespace, what: str, folder: Path, socket: str) -> subprocess.CompletedProcess:
    command = [sys.executable, __file__, "--worker", what, "--folder", str(folder), "--socket", socket,
               "--gb", str(args.gb), "--rounds", str(args.rounds), "--device", args.device]
    return subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forebay", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--timeout-s", type=float, default=120)
    parser.add_argument("--worker")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--socket")
    args = parser.parse_args()
    if args.worker == "dies":
        dies(args, args.folder, args.socket)
    elif args.worker == "killed":
        print(json.dumps(killed(args, args.folder, args.socket)))
        return 0
    elif args.worker:
        print(json.dumps(stalls(args, args.worker, args.folder, args.socket)))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="fbs", dir="/dev/shm"))
    results: dict = {}
    for name in ("none", "shared"):
        (folder / name).mkdir()
    (folder / "forebay.toml").write_text(CONFIG.format(folder=folder))
    with open(folder / "agent.log", "wb") as log:
        run = [str(args.forebay), "agent", "--config", str(folder / "forebay.toml")]
        agent = subprocess.Popen(run, stdout=log, stderr=log)
    try:
        socket = str(folder / "agent.sock")
        while not Path(socket).exists():
            time.sleep(0.02)
        for what in ("survive", "pool", "shadow", "killed"):
            if what == "shadow" and args.device == "cpu":
                continue
            done = worker(args, what, folder, socket)
            last = done.stdout.strip().splitlines()
            results[what] = json.loads(last[-1]) if last else {"error": done.stderr[-2000:]}
            print(what, json.dumps({k: v for k, v in results[what].items() if k != "rounds"}), flush=True)
    finally:
        agent.terminate()
        agent.wait()
        shutil.rmtree(folder)
    if args.out:
        about = {"cpu": environment.cpu_model(), "cores": environment.cores(),
                 "memory": environment.memory(), "gpus": environment.gpus()}
        args.out.write_text(json.dumps({"environment": about, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
