"""A training job: a small transformer that learns to write bytes of text, sharded by FSDP2, saved as it goes.

Between ranks it uses gloo, on the CPU, so that it runs on any machine. It is deterministic (one thread a rank, everything
drawn from seeds), so that two runs can be compared bit by bit.

The data comes in `STREAMS` streams, which the ranks share out. Where a batch begins follows from the number of its step. Which
bytes of it are hidden is drawn from a generator of the stream: that state belongs to the rank that reads the stream, and is
saved as its own (`per_rank=`). A job of fewer ranks takes over streams, and their generators with them; so it sees the same
data, and its losses differ only by the order in which ranks are summed up.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forebay
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

LAYERS, WIDTH, HEADS, CONTEXT = 4, 128, 4, 64
#: Bytes, and one more for those that are hidden.
VOCABULARY, HIDDEN = 257, 256
STREAMS, SEQUENCES = 4, 4
HIDE = 0.1
SEED = 20_240_229


@dataclass(frozen=True)
class Job:
    """What the ranks of one run are told."""

    text: Path
    #: Where checkpoints are, shared by runs that go on with one another.
    checkpoints: Path
    #: Where this run writes what it saw.
    out: Path
    steps: int
    save_every: int
    #: A rank and a step at whose save it kills itself.
    killed: tuple[int, int] | None = None


class Block(nn.Module):
    """Attention to what came before, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.norm_mlp = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.query_key_value(self.norm_attention(x)).chunk(3, dim=-1)
        heads = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Streams:
    """The streams that this rank reads."""

    def __init__(self, text: bytes, rank: int, world: int) -> None:
        if STREAMS % world:
            raise SystemExit(f"error: {STREAMS} streams cannot be shared by {world} ranks")
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        share = STREAMS // world
        self._generators = {
            stream: torch.Generator().manual_seed(SEED + stream)
            for stream in range(rank * share, (rank + 1) * share)
        }

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes into the model, and what should come out."""
        order = torch.Generator().manual_seed(SEED * 1000 + step)
        last = len(self._text) - CONTEXT - 1
        starts = torch.randint(0, last, (STREAMS, SEQUENCES), generator=order)
        inputs, targets = [], []
        for stream, generator in self._generators.items():
            windows = [self._text[at : at + CONTEXT + 1] for at in starts[stream].tolist()]
            whole = torch.stack(windows)
            hidden = torch.rand(SEQUENCES, CONTEXT, generator=generator) < HIDE
            inputs.append(whole[:, :-1].masked_fill(hidden, HIDDEN))
            targets.append(whole[:, 1:])
        return torch.cat(inputs), torch.cat(targets)

    def state(self) -> dict[str, torch.Tensor]:
        """What has been drawn so far, by stream."""
        return {_name(stream): one.get_state() for stream, one in self._generators.items()}

    def restore(self, saved: dict[str, torch.Tensor]) -> None:
        """Goes on where the streams were, whichever ranks read them then."""
        for stream, generator in self._generators.items():
            generator.set_state(saved[_name(stream)])


def _name(stream: int) -> str:
    return f"stream-{stream}"


def train(job: Job) -> None:
    """Trains from the newest commit, or from the beginning, to the last step. Called on every rank."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Transformer()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    streams = Streams(job.text.read_bytes(), rank, world)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "step": 0}

    with forebay.Checkpointer(job.checkpoints) as checkpoints:
        if checkpoints.latest() is not None:
            _resume(checkpoints, state, streams)
        saves = []
        for step in range(state["step"] + 1, job.steps + 1):
            loss = _step(model, optimizer, streams, step)
            _note(job, rank, {"step": step, "loss": loss})
            state["step"] = step
            if step % job.save_every == 0:
                saves.append(checkpoints.save(step, state, per_rank=streams.state()))
                if job.killed == (rank, step):
                    # The state was copied. That it is written and committed was up to threads of this process.
                    os.kill(os.getpid(), signal.SIGKILL)
        stalls = [save.result(timeout=120.0)["stall_seconds"] for save in saves]
        _note(job, rank, {"stalls": stalls, "digests": _digests(model, optimizer)})


def _resume(checkpoints: Any, state: dict[str, Any], streams: Streams) -> None:
    report = checkpoints.restore(state)
    saved: dict[str, Any] = {}
    for rank in report.per_rank_saved_by:
        saved.update(checkpoints.per_rank(report.step, rank))
    streams.restore(saved)
    print(
        f"restored step {report.step}: {report.bytes} bytes in {report.seconds:.3f} s", flush=True
    )


def _step(model: nn.Module, optimizer: Any, streams: Streams, step: int) -> float:
    inputs, targets = streams.batch(step)
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    distributed.all_reduce(mean)
    return (mean / distributed.get_world_size()).item()


def _digests(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """SHA-256 of every whole tensor of the model and of AdamW. Collective: ranks gather their shards."""
    found = {}
    for name, parameter in model.named_parameters():
        found[f"model.{name}"] = _sha256(parameter.detach())
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind} of {name}"] = _sha256(optimizer.state[parameter][kind])
    return found


def _sha256(tensor: Any) -> str:
    return hashlib.sha256(tensor.full_tensor().contiguous().numpy().tobytes()).hexdigest()


def _note(job: Job, rank: int, facts: dict[str, Any]) -> None:
    """A line of the run's record. JSON gives every float so that it reads back as the same bits."""
    if rank == 0:
        with (job.out / "record.jsonl").open("a") as record:
            record.write(json.dumps(facts) + "\n")


def main(arguments: list[str]) -> None:
    """Where something else starts the ranks and sets RANK, WORLD_SIZE and MASTER_ADDR, such as torchrun."""
    if len(arguments) != 3:
        sys.exit("usage: train.py TEXT CHECKPOINTS OUT")
    text, checkpoints, out = map(Path, arguments)
    out.mkdir(parents=True, exist_ok=True)
    distributed.init_process_group("gloo")
    train(Job(text, checkpoints, out, steps=24, save_every=4))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
