#!/usr/bin/env python3
"""Checkpoints of one GPU against stock torch, in one run.

    bench/device/ckpt.py --out results.json --gb 8 --folder /dev/shm/forebay-ckpt --disk /tmp/forebay-ckpt

Sections, each in a process of its own so that one hang or leak does not touch the next:

Forebay is given the state at construction, as a job that knows what it will save does: memory is made then.

- `stall`: how long `save` keeps the caller, first save and later ones, and how long until the step is committed:
  Forebay with the shadow, with a pool as large as the state, and with one of 2 GB; torch's `dcp.save` and `async_save`
  with the options that serve them best.
- `load`: all of it back into GPU memory, every byte of ours verified, against `dcp.load`.
- `disk`: saves to a disk, fsync included, beside the disk's own rate for the same bytes.
- `loop`: steps of a small transformer, with a save every ten and without.

Times are `perf_counter` seconds; the GPU is synchronised before a clock starts and, where bytes come to it, before it
stops. What is saved is compared bit for bit after the clocks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers import environment  # noqa: E402


def state_of(gb: float, device: str, tensors: int = 120) -> dict:
    """fp32 tensors like those of a model with its optimizer: a few large, many middling."""
    import torch

    torch.manual_seed(1)
    side = int((gb * 1e9 / 4 / tensors) ** 0.5) // 64 * 64
    return {f"layer{i}.weight": torch.randn(side, side, device=device) for i in range(tensors)}


def bytes_of(state: dict) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


def fresh(folder: str) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    return folder


def timed(work):
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    out = work()
    return time.perf_counter() - began, out


def change(state: dict, seed: int) -> None:
    for tensor in state.values():
        tensor.add_(seed)


def forebay_stall(args, mode: str) -> dict:
    import forebay
    import torch

    options = {
        "shadow": {"shadow": True},
        "pool": {"shadow": False, "staging_bytes": int(args.gb * 1.02e9)},
        "pool2": {"shadow": False, "staging_bytes": 2 << 30},
    }[mode]
    state = state_of(args.gb, "cuda:0")
    torch.cuda.synchronize()
    began = time.perf_counter()
    checkpoints = forebay.Checkpointer(fresh(args.folder), state=state, keep_last=1, **options)
    made = time.perf_counter() - began
    predicted = checkpoints.predicted_stall_s
    rows = []
    for number in range(args.rounds):
        change(state, number + 1)
        stall, handle = timed(lambda n=number: checkpoints.save(n + 1, state))
        handle.wait()
        rows.append({"stall": stall, "report": handle.result()})
    before = {name: tensor.clone() for name, tensor in state.items()}
    change(state, 100)
    seconds, report = timed(lambda: _restore(checkpoints, state))
    equal = all(torch.equal(before[name], state[name]) for name in state)
    checkpoints.close()
    return {
        "made_seconds": made,
        "predicted_stall_s": predicted,
        "rows": rows,
        "load_seconds": seconds,
        "equal": equal,
        "bytes": bytes_of(state),
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _restore(checkpoints, state):
    import torch

    report = checkpoints.restore(state)
    torch.cuda.synchronize()
    return report


def stock_async(state: dict, folder: str, mode: str) -> dict:
    """One `async_save`. The stager of torch 2.11 with every option serves one save: the second raises KeyError, as
    its first call empties its own table of types. So each save gets a new one, and pins memory anew."""
    import torch.distributed.checkpoint as dcp

    keywords = {}
    began = time.perf_counter()
    if mode in ("async-best", "async-process"):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        keywords["async_stager"] = DefaultStager(StagingOptions(True, True, True, True))
    made = time.perf_counter() - began
    if mode == "async-process":
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        keywords["async_checkpointer_type"] = kind
    began = time.perf_counter()
    stall, future = timed(lambda: dcp.async_save(state, checkpoint_id=folder, **keywords))
    staged = stall
    if hasattr(future, "staging_completion"):
        future.staging_completion.result()
        staged = time.perf_counter() - began
        future = future.upload_completion
    future.result()
    return {"made": made, "stall": stall, "staged": staged, "total": time.perf_counter() - began}


def torch_checkpointing(args) -> dict:
    """torch_checkpointing with its staging prewarmed. `staged` is when its lock lets an optimizer step."""
    from torch_checkpointing import CheckpointManager

    state = state_of(args.gb, "cuda:0")
    manager = CheckpointManager()
    manager.prewarm_staging({"state": state})
    rows = []
    for number in range(args.rounds):
        change(state, number + 1)
        folder = fresh(args.folder) + "/step"
        began = time.perf_counter()
        stall, future = timed(lambda f=folder: manager.save(f, {"state": state}))
        with manager.lock():
            staged = time.perf_counter() - began
        future.result()
        rows.append({"stall": stall, "staged": staged, "total": time.perf_counter() - began})
    before = {name: tensor.clone() for name, tensor in state.items()}
    change(state, 100)
    seconds, _ = timed(lambda: manager.load(folder, into={"state": state}))
    equal = all((before[name] == state[name]).all().item() for name in state)
    manager.close()
    return {"rows": rows, "bytes": bytes_of(state), "load_seconds": seconds, "equal": equal}


def stock(args, mode: str) -> dict:
    """`sync`, `sync8`, `async`, `async-best`, `async-process`."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    state = state_of(args.gb, "cuda:0")
    rows = []
    for number in range(args.rounds):
        change(state, number + 1)
        folder = fresh(args.folder)
        if mode.startswith("sync"):
            threads = 8 if mode == "sync8" else 1
            writer = dcp.FileSystemWriter(folder, thread_count=threads)
            stall, _ = timed(lambda w=writer: dcp.save(state, storage_writer=w))
            rows.append({"stall": stall, "total": stall})
        else:
            rows.append(stock_async(state, folder, mode))
    out = {"rows": rows, "bytes": bytes_of(state)}
    if mode.startswith("sync"):
        change(state, 100)
        seconds, _ = timed(lambda: (dcp.load(state, checkpoint_id=args.folder),
                                    torch.cuda.synchronize()))
        out["load_seconds"] = seconds
    dist.destroy_process_group()
    return out


def disk_rate(folder: str, gb: float) -> float:
    """GB/s of sequential direct writes of 8 MiB by 4 threads into one file each, fsync included."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    fresh(folder)
    size = int(gb * 1e9) // 4 // (8 << 20) * (8 << 20)
    block = mmap.mmap(-1, 8 << 20)
    block.write(os.urandom(8 << 20))

    def one(number):
        fd = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
        for at in range(0, size, 8 << 20):
            os.pwrite(fd, block, at)
        os.fsync(fd)
        os.close(fd)

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    return 4 * size / (time.perf_counter() - began) / 1e9


def disk(args) -> dict:
    import forebay

    state = state_of(args.disk_gb, "cuda:0")
    out = {"bytes": bytes_of(state), "raw": [], "forebay": []}
    folder = args.disk
    for number in range(2):
        out["raw"].append(disk_rate(folder + "/raw", args.disk_gb))
        shutil.rmtree(folder + "/raw")
        with forebay.Checkpointer(fresh(folder + "/ours"), device="cuda:0") as checkpoints:
            seconds, handle = timed(lambda c=checkpoints: c.save(1, state, blocking=True))
            out["forebay"].append({"seconds": seconds, "report": handle.result()})
    shutil.rmtree(folder, ignore_errors=True)
    return out


def loop(args, mode: str) -> dict:
    import forebay
    import torch

    torch.manual_seed(2)
    device = "cuda:0"
    layer = torch.nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True, device=device)
    model = torch.nn.TransformerEncoder(layer, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    checkpoints = None
    if mode != "none":
        options = {"shadow": True} if mode == "shadow" else {
            "shadow": False, "staging_bytes": args.pool_bytes}
        checkpoints = forebay.Checkpointer(
            fresh(args.folder), device=device, keep_last=1, on_busy="wait", **options)
        if mode == "hook":
            checkpoints.attach(optimizer)
    steps = []
    data = torch.randn(8, 512, 2048).pin_memory()
    for step in range(args.steps):
        began = time.perf_counter()
        batch = data.to(device, non_blocking=True)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if checkpoints is not None and step % 10 == 5:
            checkpoints.save(step, {"model": model, "optim": optimizer})
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - began)
    if checkpoints is not None:
        checkpoints.close()
    steps = sorted(steps[20:])
    count = sum(p.numel() for p in model.parameters())
    return {"p50": statistics.median(steps), "p99": steps[int(len(steps) * 0.99) - 1],
            "steps": len(steps), "state_bytes": count * 12}


SECTIONS = {
    "forebay-shadow": lambda a: forebay_stall(a, "shadow"),
    "forebay-pool": lambda a: forebay_stall(a, "pool"),
    "forebay-pool2": lambda a: forebay_stall(a, "pool2"),
    "stock-sync": lambda a: stock(a, "sync"),
    "stock-sync8": lambda a: stock(a, "sync8"),
    "stock-async": lambda a: stock(a, "async"),
    "stock-async-best": lambda a: stock(a, "async-best"),
    "stock-async-process": lambda a: stock(a, "async-process"),
    "torch-checkpointing": torch_checkpointing,
    "disk": disk,
    "loop-none": lambda a: loop(a, "none"),
    "loop-shadow": lambda a: loop(a, "shadow"),
    "loop-pool": lambda a: loop(a, "pool"),
    "loop-hook": lambda a: loop(a, "hook"),
    "loop-none-again": lambda a: loop(a, "none"),
}


def show(name: str, found: dict) -> str:
    if "error" in found:
        return f"{name:22} {found['error'][-300:]}"
    text = f"{name:22}"
    gb = found.get("bytes", 0) / 1e9
    if "rows" in found:
        stalls = [f"{row['stall'] * 1e3:.0f}" for row in found["rows"]]
        text += f" stall ms {' '.join(stalls)}"
        if found.get("predicted_stall_s") is not None:
            text += f" (predicted {found['predicted_stall_s'] * 1e3:.0f})"
        if "staged" in found["rows"][0]:
            text += " staged ms " + " ".join(f"{row['staged'] * 1e3:.0f}" for row in found["rows"])
        totals = [row.get("total") or row["report"].get("durable_seconds", 0) + row["report"].get(
            "commit_seconds", 0) for row in found["rows"]]
        text += " | total GB/s " + " ".join(f"{gb / t:.1f}" for t in totals if t)
    if "load_seconds" in found:
        text += f" | load GB/s {gb / found['load_seconds']:.1f} equal {found.get('equal')}"
    if "raw" in found:
        ours = [gb / run["seconds"] for run in found["forebay"]]
        text += f" raw {found['raw']} ours {ours}"
    if "p50" in found:
        text += f" p50 {found['p50'] * 1e3:.2f} ms p99 {found['p99'] * 1e3:.2f} ms"
    return text


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", default="ckpt.json")
    p.add_argument("--gb", type=float, default=8)
    p.add_argument("--disk-gb", type=float, default=4)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--steps", type=int, default=120)
    p.add_argument("--pool-bytes", type=int, default=9 << 30)
    p.add_argument("--folder", default="/dev/shm/forebay-ckpt")
    p.add_argument("--disk", default="/tmp/forebay-ckpt")
    p.add_argument("--sections", default=",".join(SECTIONS))
    p.add_argument("--timeout-s", type=float, default=60)
    p.add_argument("--one", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.one:
        print("RESULT " + json.dumps(SECTIONS[args.one](args), default=str))
        return 0
    found = {}
    for name in args.sections.split(","):
        words = [sys.executable, __file__, *sys.argv[1:], "--one", name]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=args.timeout_s)
            lines = [t for t in done.stdout.splitlines() if t.startswith("RESULT ")]
            found[name] = (json.loads(lines[-1][7:]) if lines
                           else {"error": (done.stderr or done.stdout)[-1500:]})
        except subprocess.TimeoutExpired:
            found[name] = {"error": "timed out"}
        print(show(name, found[name]), flush=True)
        Path(args.out).write_text(json.dumps({"command": environment.without_folders(sys.argv), "sections": found}, indent=1))
        shutil.rmtree(args.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
