"""What a restore says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RestoreReport:
    """What a restore did, on this rank. Returned by `Checkpointer.restore`.

    Attributes:
        step: the step; None for a folder that is a checkpoint by itself.
        missing: names of the state, and of `per_rank`, that the checkpoint does not have; they were left as they were.
        unexpected: names of the checkpoint that the state has no place for, and names that this rank saved as its own and
            `per_rank` has none for.
        bytes: of tensors that this rank filled.
        read_bytes: what it read from storage for that, and for other ranks of its host.
        shared_bytes: what it took from memory that the ranks of its host share: read once for all of them.
        unverified_bytes: of what it read, those that there was no checksum to compare with; `warnings` says why.
        seconds: of the whole call.
        per_rank_saved_by: ranks that saved values of their own (`per_rank=`), and the names of those.
        per_rank_left: ranks whose own values no rank of this job restored.
        per_rank_restored: names of own values that this rank got back; empty where none were asked for, or it saved none.
        origin: who wrote the checkpoint: "forebay", "dcp" (torch) or "safetensors_shards" (torch's Hugging Face writer).
        warnings: what went otherwise than one might think; also warned of (`warnings.warn`), what concerns all ranks by
            rank 0. What was accepted of a foreign checkpoint, and bytes of it without a checksum, are told here alone.
        transfers: one report for each part of the reading, as `forebay.last_report` has them.
    """

    step: int | None
    missing: list[str]
    unexpected: list[str]
    bytes: int = 0
    read_bytes: int = 0
    shared_bytes: int = 0
    unverified_bytes: int = 0
    seconds: float = 0.0
    per_rank_saved_by: dict[int, tuple[str, ...]] = field(default_factory=dict)
    per_rank_left: list[int] = field(default_factory=list)
    per_rank_restored: list[str] = field(default_factory=list)
    origin: str = ""
    warnings: list[str] = field(default_factory=list)
    transfers: list[dict[str, Any]] = field(default_factory=list)
