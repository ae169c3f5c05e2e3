"""What a restore says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RestoreReport:
    """What a restore did."""

    #: The step; None for a folder that is a checkpoint by itself.
    step: int | None
    #: Names of the state, and of `per_rank`, that the checkpoint does not have; they were left as they were.
    missing: list[str]
    #: Names of the checkpoint that the state has no place for, and names that this rank saved as its own and `per_rank`
    #: has none for.
    unexpected: list[str]
    #: Bytes of tensors that this rank filled.
    bytes: int = 0
    #: Bytes that it read from storage for that, and for other ranks of its host.
    read_bytes: int = 0
    #: Bytes that it took from memory that the ranks of its host share: read once for all of them.
    shared_bytes: int = 0
    #: Of the whole call.
    seconds: float = 0.0
    #: Ranks that saved values of their own (`per_rank=`), and the names of those.
    per_rank_saved_by: dict[int, tuple[str, ...]] = field(default_factory=dict)
    #: Ranks whose own values no rank of this job restored.
    per_rank_left: list[int] = field(default_factory=list)
    #: Names of own values that this rank got back; empty where none were asked for, or it saved none.
    per_rank_restored: list[str] = field(default_factory=list)
    #: Who wrote the checkpoint: "forebay", "dcp" (torch) or "safetensors_shards" (torch's Hugging Face writer).
    origin: str = ""
    #: What went otherwise than one might think; also warned of (`warnings.warn`), what concerns all ranks by rank 0.
    warnings: list[str] = field(default_factory=list)
    #: One report for each part of the reading, as `forebay.last_report` has them.
    transfers: list[dict[str, Any]] = field(default_factory=list)
