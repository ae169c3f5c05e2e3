#!/usr/bin/env python3
"""A training loop on several GPUs, with saves and without, in one run.

    bench/device/ckpt_ranks.py --gpus 2 --out results.json --folder /dev/shm/forebay-ranks

A transformer is trained data-parallel: its input comes from pinned host memory each step, gradients are all-reduced by
NCCL. Every tenth step is saved, model and optimizer. Modes take turns, each in processes of its own: `none`, `shadow`,
`hook` (a pool, copies overlap the next pass), `none` again. Steps count from the twentieth on; the memory of saves is
made before, by `Checkpointer.prepare`, and the first save is among those that count. Times are those of rank 0, from
the copy of the input to the end of the step, the GPU synchronised. `shadow:threads=2` gives the Checkpointer that many
threads, `shadow:nice=10` starts the threads of a save with that lower priority.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import environment  # noqa: E402

WARM = 20


def rank_main(rank: int, args: argparse.Namespace, mode: str, port: int, out: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=args.gpus)
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, device=device)
    model = torch.nn.TransformerEncoder(layer, args.layers)
    parallel = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    state = {"model": model, "optim": optimizer}
    mode, _, more = mode.partition(":")
    options = {key: int(value) for key, value in (pair.split("=") for pair in more.split(",") if pair)}
    nice = options.pop("nice", 0)
    checkpoints = made(args.folder, mode, device, options)
    data = torch.randn(8, 512, 2048).pin_memory()
    steps, stalls = [], []
    for step in range(WARM + args.steps):
        if step == WARM - 1 and checkpoints is not None:
            checkpoints.prepare(state)
            if mode == "hook":
                checkpoints.attach(optimizer)
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = parallel(data.to(device, non_blocking=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpoints is not None and step >= WARM and step % 10 == 5:
            before = time.perf_counter()
            if nice:  # threads start with the priority of the one that starts them
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
            checkpoints.save(step, state)
            if nice:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 0)
            stalls.append(time.perf_counter() - before)
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - began)
    if checkpoints is not None:
        checkpoints.wait()
        checkpoints.close()
    if rank == 0:
        counted = sorted(steps[WARM:])
        Path(out).write_text(json.dumps({
            "p50": statistics.median(counted),
            "p99": counted[int(len(counted) * 0.99) - 1],
            "max": counted[-1],
            "steps": steps,
            "warm_steps": WARM,
            "save_call_seconds": stalls,
            "state_bytes": sum(p.numel() for p in model.parameters()) * 12,
        }))
    dist.destroy_process_group()


def made(folder: str, mode: str, device: str, more: dict[str, int]):
    """The checkpointer of a mode; None where nothing is saved."""
    import forebay

    options = {"shadow": {"shadow": True}, "hook": {"shadow": False, "staging_bytes": 6 << 30}}
    if mode not in options:
        return None
    return forebay.Checkpointer(folder, device=device, keep_last=1, **options[mode], **more)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--folder", default="/dev/shm/forebay-ranks")
    p.add_argument("--modes", default="none/shadow/hook/none")
    p.add_argument("--out", default="ckpt_ranks.json")
    args = p.parse_args()
    import torch.multiprocessing as mp

    runs = []
    for number, mode in enumerate(args.modes.split("/")):
        shutil.rmtree(args.folder, ignore_errors=True)
        os.makedirs(args.folder)
        one = f"{args.out}.{number}"
        mp.spawn(rank_main, (args, mode, 29611 + number, one), nprocs=args.gpus)
        found = json.loads(Path(one).read_text())
        os.remove(one)
        runs.append({"mode": mode, **found})
        print(f"{mode:20} p50 {found['p50'] * 1e3:.2f} ms p99 {found['p99'] * 1e3:.2f} ms "
              f"max {found['max'] * 1e3:.2f} ms", flush=True)
        Path(args.out).write_text(json.dumps({"command": environment.without_folders(sys.argv), "runs": runs}, indent=1))
    shutil.rmtree(args.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
