"""Restores: from a committed step into a state that exists.

All ranks restore the same step: rank 0 says which. Each reads the regions that it holds, whatever mesh they were saved
from, and nothing else; every byte is checked on its way. A rank that fails makes the others fail with its error, and
before anything is handed to `load_state_dict`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.flatten import Flat, flatten, has_state
from forebay._ckpt.held import Describer
from forebay._ckpt.nodeshare import SHARED_BYTES, Job, Want, read_together
from forebay._ckpt.objects import unpack
from forebay._ckpt.optimizers import is_fresh, state_for
from forebay._ckpt.perrank import PER_RANK
from forebay._ckpt.quiet import quiet
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.reading import read_regions
from forebay._ckpt.settings import Progress
from forebay._ckpt.snapshot import HOST
from forebay._ckpt.targets import Contents, Piece, Targets, match, nested_value, unexpected
from forebay._errors import Error, make, quoted, usage

_SHOWN = 8

#: How often a reader says that it is alive.
_BEAT_SECONDS = 2.0


@dataclass
class RestoreReport:
    """What a restore did."""

    step: int
    #: Names of the state that the checkpoint does not have; they were left as they were.
    missing: list[str]
    #: Names of the checkpoint that the state has no place for.
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
    #: "forebay", "dcp" or "safetensors_shards".
    origin: str = ""
    warnings: list[str] = field(default_factory=list)
    #: One report a device, as `forebay.last_report` has them.
    transfers: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Request:
    """The arguments of a restore."""

    directory: Path
    state: Any
    per_rank: Any
    strict: bool
    weights_only: bool
    threads: int | None
    progress: Progress | None
    #: Memory that the ranks of a host share while they read; 0 for none.
    node_bytes: int = SHARED_BYTES


def restore(request: Request, ranks: Ranks, step: int) -> RestoreReport:
    """Fills a state from a committed step. A collective call."""
    began = perf_counter()
    failure: BaseException | None = None
    work: _Work | None = None
    try:
        with quiet():
            work = _Work(request, ranks, step)
    except Exception as error:  # noqa: BLE001
        failure = error
    # Reading together is collective: all are there, or none reads.
    _all_well(ranks, failure)
    assert work is not None
    try:
        with quiet():
            work.read()
    except Exception as error:  # noqa: BLE001
        failure = error
    _all_well(ranks, failure)
    try:
        work.hand_over()
    except Exception as error:  # noqa: BLE001
        failure = error
    _all_well(ranks, failure)
    report = work.report
    report.seconds = perf_counter() - began
    if work.left is not None:
        report.warnings.append(work.left)
        if ranks.rank == 0:
            warnings.warn(work.left, stacklevel=3)
    return report


def _all_well(ranks: Ranks, failure: BaseException | None) -> None:
    """Raises if any rank failed. A collective call."""
    told = failure
    if failure is not None and not isinstance(failure, Error):
        told = usage(f"restoring failed: {type(failure).__name__}: {failure}")
    if ranks.alone:
        if failure is not None:
            raise failure
        return
    assert told is None or isinstance(told, Error)
    try:
        ranks.raise_first(told)
    except Error as raised:
        if failure is not None and not isinstance(failure, Error):
            raise failure from raised
        raise


class _Work:
    """One restore on one rank."""

    def __init__(self, request: Request, ranks: Ranks, step: int) -> None:
        self.request = request
        self.ranks = ranks
        self.report = RestoreReport(step, [], [])
        root = request.directory
        # Held until the restore ends: a prune waits for it.
        self._lease = _native.read_lease(root, step)
        self._beaten = monotonic()
        self.checkpoint = _native.Checkpoint(root, step=step)
        self.contents = Contents(self.checkpoint.entries, f"step {step} in {root}")
        self.report.origin = self.checkpoint.origin
        self.report.warnings += self.checkpoint.warnings
        describer = Describer(ranks.rank, ranks.group_rank)
        self.flat = flatten(request.state, self._fresh_states(request.state))
        self.targets = match(self.flat, self.contents, describer)
        self.own: Flat | None = None
        #: What to warn of: per-rank values that nobody takes.
        self.left: str | None = None
        self.own_targets: Targets | None = None
        self._per_rank(describer)
        self._compare()
        self.values: list[tuple[Flat, int, Any]] = []

    def _fresh_states(self, state: Any) -> dict[int, Any]:
        """States with memory for optimizers that have none yet."""
        found: dict[int, Any] = {}
        entries = self.contents.entries
        if is_fresh(state):
            found[id(state)] = state_for(state, (), entries)
        elif isinstance(state, Mapping):
            for key, value in state.items():
                if has_state(value) and is_fresh(value):
                    found[id(value)] = state_for(value, (str(key),), entries)
        return found

    def _per_rank(self, describer: Describer) -> None:
        saved = self.report.per_rank_saved_by = self.contents.saved_by()
        rank, size = self.ranks.rank, self.ranks.size
        self.report.per_rank_left = [one for one in saved if one >= size]
        wanted = self.request.per_rank
        if wanted is not None:
            if not isinstance(wanted, Mapping):
                raise usage(f"per_rank is {type(wanted).__name__}, a dict is needed")
            self.own = flatten(wanted)
            prefix = f"{PER_RANK}{rank}/"
            self.own.names = [prefix + name for name in self.own.names]
            self.own.paths = [(f"{prefix}{path[0]}", *path[1:]) for path in self.own.paths]
            self.own_targets = match(self.own, self.contents, describer)
            self.report.missing += self.own_targets.missing
        elif saved:
            self.report.per_rank_left = list(saved)
        if saved and (self.report.per_rank_left or size > max(saved) + 1):
            ranks = ", ".join(map(str, saved))
            left = ", ".join(map(str, self.report.per_rank_left)) or "none"
            self.left = (
                f"values of their own were saved by ranks {ranks}; this job has {size}. "
                f"Not restored: those of ranks {left}. Checkpointer.per_rank reads them"
            )

    def _compare(self) -> None:
        inside, outside = unexpected(self.flat, self.contents, self.targets.used)
        self.report.missing += self.targets.missing
        self.report.unexpected = inside + outside
        if not self.request.strict or not (self.targets.missing or inside):
            return
        said = []
        if self.targets.missing:
            said.append(f"the checkpoint lacks {_some(self.targets.missing)}")
        if inside:
            said.append(f"the state has no place for {_some(inside)}")
        hint = "strict=False restores what both have, and reports the rest"
        raise make("structure_mismatch", "; ".join(said), self.contents.title, [hint])

    def read(self) -> None:
        """Reads tensors into their memory, and objects into values that are not handed over yet."""
        own = [] if self.own_targets is None else self.own_targets.pieces
        total = sum(piece.memory.nbytes for piece in (*self.targets.pieces, *own))
        pieces = self._read_together(total) + own
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.memory.device, []).append(piece)
        for device, group in by_device.items():
            self._fill(device, group, total)
        self._read_objects(self.flat, self.targets)
        if self.own is not None and self.own_targets is not None:
            self._read_objects(self.own, self.own_targets)
        self.report.read_bytes = sum(int(one["read_bytes"]) for one in self.report.transfers)

    def _read_together(self, total: int) -> list[Piece]:
        """Reads what several ranks of this host need; returns what is left to each. A collective call."""
        if self.ranks.alone:
            return self.targets.pieces
        told = self._told(total)

        def read(wants: list[Want], memory: list[torch.Tensor], before: int) -> dict[str, Any]:
            def alive(_: int, __: int) -> None:
                told(before, total)

            threads = self.request.threads
            return read_regions(self.checkpoint, wants, memory, "host", threads, alive)

        entries, limit = self.contents.entries, self.request.node_bytes
        job = Job(self.ranks, self.checkpoint, entries, self.targets.pieces, limit, read)
        done = read_together(job)
        self.report.transfers += done.reports
        self.report.bytes += done.bytes
        self.report.shared_bytes = done.bytes
        self._told(total)(0, total)
        return done.left

    def _fill(self, device: torch.device, pieces: list[Piece], total: int) -> None:
        known = device.type in ("cpu", "cuda")
        name = f"cuda:{device.index}" if device.type == "cuda" else "host"
        kind = device if known else HOST
        memory = [
            piece.memory
            if known and _can_be_filled(piece.memory)
            else torch.empty(piece.memory.shape, dtype=piece.memory.dtype, device=kind)
            for piece in pieces
        ]
        report = read_regions(
            self.checkpoint,
            [(piece.entry, *piece.region) for piece in pieces],
            memory,
            name,
            self.request.threads,
            self._told(total),
        )
        self.report.transfers.append(report)
        with torch.no_grad():
            for piece, filled in zip(pieces, memory, strict=True):
                if filled is not piece.memory:
                    piece.memory.copy_(filled)
        self.report.bytes += sum(piece.memory.nbytes for piece in pieces)

    def _told(self, total: int) -> Progress:
        progress, before = self.request.progress, self.report.bytes

        def told(done: int, _: int) -> None:
            if monotonic() - self._beaten > _BEAT_SECONDS:
                self._beaten = monotonic()
                self._lease.beat()
            if progress is not None:
                progress(before + done, total)

        return told

    def _read_objects(self, flat: Flat, targets: Targets) -> None:
        known: dict[int, Any] = {}
        for place, number in targets.objects:
            self.values.append((flat, place, self._object(number)))
        for place, number, keys in targets.nested:
            if number not in known:
                known[number] = self._object(number)
            value = nested_value(flat.names[place], known[number], keys)
            self.values.append((flat, place, value))

    def _object(self, number: int) -> Any:
        name = self.contents.entries[number][0]
        return unpack(self.checkpoint, name, self.request.weights_only)

    def hand_over(self) -> None:
        """Puts objects into their containers, and gives states to the objects that they belong to."""
        for flat, place, value in self.values:
            home, key = flat.homes[place]
            home[key] = value
        owners = self.flat.owners + (self.own.owners if self.own is not None else [])
        # What is inside first.
        for owner, _, own in reversed(owners):
            owner.load_state_dict(own)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(quoted, names[:_SHOWN])) + more


def _can_be_filled(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
