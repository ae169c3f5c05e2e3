"""A small training job for `ckpt-chaos`, which kills it at each change that it makes to its folder and starts it again.

    ckpt-chaos run ... -- python chaos_train.py --output_dir {out}

It resumes from the newest commit, says from which, saves every other step in the background, saves and ends when it is told
to (SIGTERM), and writes its final weights to `final.pt`: those of a run that was killed must be those of one that was not.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from pathlib import Path

import torch
from torch import nn

import forebay

STEPS = 11
SAVE_EVERY = 2


def fixed_run_id(folder: Path) -> None:
    """Names the files of each life after its number: the tool expects a run that is repeated to write the same names."""
    epochs = folder / ".forebay" / "epoch"
    life = len(list(epochs.iterdir())) + 1 if epochs.is_dir() else 1
    secrets.token_hex = lambda bytes_=4: f"{life:0{2 * bytes_}x}"  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", type=Path, required=True)
    folder = parser.parse_args().output_dir
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank() if world > 1 else 0
    torch.manual_seed(0)
    torch.set_num_threads(1)
    fixed_run_id(folder / "steps")
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with forebay.Checkpointer(folder / "steps") as checkpoints:
        checkpoints.on_signal()
        first = 1
        if checkpoints.latest() is not None:
            first = checkpoints.restore(state).step + 1
        print(f"resumed from step {first - 1}", flush=True)
        for step in range(first, STEPS + 1):
            batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            state["step"] = step
            if checkpoints.preempted(step):
                checkpoints.save(step, state, blocking=True)
                sys.exit(143)
            if step % SAVE_EVERY == 0:
                checkpoints.save(step, state, per_rank={"rank": rank})
        checkpoints.wait()
    if rank == 0:
        torch.save(model.state_dict(), folder / "final.pt")
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
