"""Restores: from a committed step into a state that exists.

All ranks restore the same step: rank 0 says which. Each reads the regions that it holds, whatever mesh they were saved
from, and nothing else; every byte is checked on its way. A rank that fails makes the others fail with its error, and
before anything is handed to `load_state_dict`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from forebay._ckpt.choosing import Choice
from forebay._ckpt.filling import Filling
from forebay._ckpt.flatten import Flat, flatten
from forebay._ckpt.handover import hand_over
from forebay._ckpt.held import Describer
from forebay._ckpt.lookalikes import nothing_for, unfilled, wrapped
from forebay._ckpt.nodeshare import SHARED_BYTES
from forebay._ckpt.objects import unpack_all
from forebay._ckpt.optimizers import Optimizers
from forebay._ckpt.ownvalues import OwnTargets, match_own
from forebay._ckpt.perrank import PER_RANK
from forebay._ckpt.quiet import quiet
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.restorereport import RestoreReport
from forebay._ckpt.settings import Progress
from forebay._ckpt.targets import Contents, Targets, match, nested_value, unexpected
from forebay._errors import DataError, Error, make, quoted, usage
from forebay._report import unverified

_SHOWN = 8

#: What keeps an optimizer's state from being found.
_BY_NAMES = (
    "torch's get_state_dict names parameters where an optimizer counts them: put the model as a module beside the "
    "optimizer, whose names tell which is which, or restore what get_optimizer_state_dict(model, optimizer) returns and "
    "give it to set_optimizer_state_dict"
)


@dataclass(slots=True)
class Request:
    """The arguments of a restore."""

    state: Any
    per_rank: Any
    strict: bool
    weights_only: bool
    threads: int | None
    progress: Progress | None
    #: Memory that the ranks of a host share while they read; 0 for none.
    node_bytes: int = SHARED_BYTES


def restore(request: Request, ranks: Ranks, choice: Choice) -> RestoreReport:
    """Fills a state from a checkpoint. A collective call."""
    began = perf_counter()
    work: list[_Work] = []
    # Reading together is collective: all are there, or none reads.
    for phase in (lambda: work.append(_Work(request, ranks, choice)), *_PHASES):
        failure: BaseException | None = None
        try:
            with quiet():
                phase(*work)
        except Exception as error:  # noqa: BLE001
            failure = error
        _all_well(ranks, choice, failure)
    report = work[0].report
    report.seconds = perf_counter() - began
    for line in work[0].told():
        warnings.warn(line, stacklevel=3)
    return report


def _all_well(ranks: Ranks, choice: Choice, failure: BaseException | None) -> None:
    """Raises if any rank failed. A collective call."""
    told = failure
    if isinstance(failure, DataError):
        told = failure = make(
            failure.code,
            failure.what,
            failure.where,
            [*failure.hints, *choice.instead()],
            failure.causes,
        ).with_traceback(failure.__traceback__)
    elif failure is not None and not isinstance(failure, Error):
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

    def __init__(self, request: Request, ranks: Ranks, choice: Choice) -> None:
        self.request = request
        self.ranks = ranks
        self.report = RestoreReport(choice.step, [], [])
        # Held until the restore ends: a prune waits for it.
        self._lease = choice.lease()
        self.checkpoint = choice.open()
        self.contents = Contents(self.checkpoint.entries, choice.title)
        self.report.origin = self.checkpoint.origin
        self.report.warnings += self.checkpoint.warnings
        #: Lines to warn of, on this rank.
        self._lines: list[str] = []
        describer = Describer(ranks.rank, ranks.group_rank)
        self.optimizers = Optimizers(request.state, self.contents.entries)
        self.flat = flatten(request.state, ask=self.optimizers.ask)
        self.contents.index()
        self.targets = match(self.flat, self.contents, describer)
        self.own = self._per_rank(describer)
        self._compare()
        self._look_at_optimizers()
        self._look_at_the_rest()
        self.values: list[Callable[[], None]] = []

    # What is there

    def _per_rank(self, describer: Describer) -> OwnTargets | None:
        report, rank, size = self.report, self.ranks.rank, self.ranks.size
        saved = report.per_rank_saved_by = self.contents.saved_by()
        report.per_rank_left = [one for one in saved if one >= size]
        wanted = self.request.per_rank
        own = None
        if wanted is None:
            report.per_rank_left = list(saved)
        else:
            own = match_own(wanted, rank, self.contents, describer, self.optimizers.ask)
            report.missing += own.targets.missing
            report.unexpected += own.unexpected
            missing = set(own.targets.missing)
            names = [name for name in own.flat.names if name not in missing]
            names += [self.contents.stored[leaf.entry][0] for leaf in own.leaves()]
            prefix = f"{PER_RANK}{rank}/"
            report.per_rank_restored = sorted(name.removeprefix(prefix) for name in names)
        self._tell_of_own(saved, wanted is not None)
        return own

    def _tell_of_own(self, saved: dict[int, tuple[str, ...]], asked: bool) -> None:
        """What to warn of: own values that nobody takes, ranks that get none."""
        rank, size, left = self.ranks.rank, self.ranks.size, self.report.per_rank_left
        reads = "Checkpointer.per_rank reads those of any rank"
        by = f"values of their own (generators, data loaders) were saved by ranks {_ranks(saved)}"
        none = [one for one in range(size) if one not in saved] if asked else []
        if none and not saved:
            self._tell("no rank saved values of its own: every rank's per_rank is as it was given")
        elif none:
            line = (
                f"{by}; this job has {size}. Ranks {_ranks(none)} got none: their per_rank is as "
            )
            self._tell(f"{line}it was given. {reads}")
        if rank in none and rank and saved:
            line = f"rank {rank} got no values of its own: only ranks {_ranks(saved)} saved some. "
            line += f"Its per_rank is as it was given. {reads}"
            self.report.warnings.append(line)
            self._lines.append(line)
        if left and asked:
            line = (
                f"{by}; this job has {size}. Not restored: those of ranks {_ranks(left)}. {reads}"
            )
            self._tell(line)
        elif left:
            line = f"{by}. None were restored, as per_rank= was not given: per_rank={{}} is filled "
            self._tell(f"{line}with what this rank saved; {reads}")

    def _tell(self, line: str) -> None:
        """Takes a line that is the same on all ranks, for rank 0 to warn of."""
        self.report.warnings.append(line)
        if self.ranks.rank == 0:
            self._lines.append(line)

    def _compare(self) -> None:
        inside, outside = unexpected(self.flat, self.contents, self.targets.used)
        missing = list(self.targets.missing)
        self.report.missing += missing
        self.report.unexpected += inside + outside
        if self.own is not None:
            inside += self.own.unexpected
            if self.ranks.rank in self.report.per_rank_saved_by:
                # On a rank that saved nothing there is nothing to compare with.
                missing += self.own.targets.missing
        if not self.request.strict or not (missing or inside):
            return
        said = []
        if missing:
            said.append(f"the checkpoint lacks {_some(missing)}")
        if inside:
            said.append(f"the state has no place for {_some(inside)}")
        hints = ["strict=False restores what both have, and reports the rest"]
        if any(name.startswith(PER_RANK) for name in (*missing, *inside)):
            hints.append("per_rank={} is filled with all that this rank saved as its own")
        if self.optimizers.unknown:
            hints.insert(0, _BY_NAMES)
        renamed = wrapped(missing, self.contents.by_name)
        if renamed is not None:
            hints.insert(0, renamed)
        raise make("structure_mismatch", "; ".join(said), self.contents.title, hints)

    def _look_at_optimizers(self) -> None:
        """Whether what was saved of an optimizer is left out as a whole: training would go on without."""
        for owner, path, _ in self.flat.owners:
            if not isinstance(owner, torch.optim.Optimizer):
                continue
            if not self.optimizers.dropped(path, self.targets.used):
                continue
            line = (
                f"nothing of the state that {self.contents.title} has for the optimizer "
                f"{quoted('.'.join(map(str, path)))} is restored: it goes on as it is. "
            )
            line += _BY_NAMES if path in self.optimizers.unknown else "Is it built as it was saved?"
            self.report.warnings.append(line)
            self._lines.append(line)

    def _look_at_the_rest(self) -> None:
        """Whether a module, or another part of the state, gets nothing."""
        missing = self.targets.missing
        for way in unfilled(self.flat, missing) if missing else ():
            below = [
                name
                for name, path in zip(self.flat.names, self.flat.paths, strict=True)
                if path[: len(way)] == way
            ]
            line = nothing_for(way, self.contents.title, wrapped(below, self.contents.by_name))
            self.report.warnings.append(line)
            self._lines.append(line)

    # Reading

    def read(self) -> None:
        """Reads tensors into their memory, and objects into values that are not handed over yet."""
        own = [] if self.own is None else self.own.pieces
        request = self.request
        filling = Filling(
            self.ranks,
            self.checkpoint,
            self.contents.stored,
            self.report,
            None if self._lease is None else self._lease.beat,
            request.threads,
            request.progress,
        )
        filling.fill(self.targets.pieces, own, request.node_bytes)
        self._compare_ties(filling, self.targets)
        if self.own is not None:
            self._compare_ties(filling, self.own.targets)
        self.report.read_bytes = sum(int(one["read_bytes"]) for one in self.report.transfers)
        rest = sum(int(one["unverified_bytes"]) for one in self.report.transfers)
        self.report.unverified_bytes = rest
        if rest:
            self.report.warnings.append(f"not verified: {unverified(self.report.origin, rest)}")
        self._read_objects(self.flat, self.targets)
        if self.own is not None:
            self._read_objects(self.own.flat, self.own.targets)
            values = self._objects(self.own.objects)
            self.values += [one.giver(values) for one in self.own.made]

    def _compare_ties(self, filling: Filling, targets: Targets) -> None:
        """Whether names that are one tensor here have one value in the checkpoint: a model whose weights were not tied
        when it was saved would go on as another one."""
        for tie in targets.ties:
            if self.checkpoint.is_one(*tie.entries):
                continue
            # Only what the stored checksums leave open is read.
            regions = [piece.region for piece in tie.pieces]
            same = self.checkpoint.same_sums(*tie.entries, regions)
            if filling.holds(tie.pieces) if same is None else same:
                continue
            first, other = quoted(tie.first), quoted(tie.other)
            line = (
                f"{first} and {other} are one tensor in the state (tied), and differ in "
                f"{self.contents.title}: both have the value of {first} now, that of {other} is not restored"
            )
            self.report.warnings.append(line)
            self._lines.append(line)

    def _objects(self, numbers: Sequence[int]) -> dict[int, Any]:
        wanted = [(number, self.contents.stored[number][0]) for number in dict.fromkeys(numbers)]
        values = unpack_all(self.checkpoint, wanted, self.request.weights_only)
        return dict(zip((number for number, _ in wanted), values, strict=True))

    def _read_objects(self, flat: Flat, targets: Targets) -> None:
        groups = self.optimizers.groups
        numbers = [number for _, number in targets.objects]
        once = self._objects([number for _, number, _ in targets.nested])
        # Each place gets a value of its own.
        wanted = [(number, self.contents.stored[number][0]) for number in numbers]
        values = unpack_all(self.checkpoint, wanted, self.request.weights_only)
        for (place, number), value in zip(targets.objects, values, strict=True):
            if number in groups:
                self._check_group(number, value, groups[number])
            else:
                self.values.append(_setter(flat, place, value))
        for place, number, keys in targets.nested:
            value = nested_value(flat.names[place], once[number], keys)
            self.values.append(_setter(flat, place, value))

    def _check_group(self, number: int, saved: Any, names: list[str]) -> None:
        """Whether the parameters of a group are those that were saved. Which place each has is the optimizer's matter."""
        if not isinstance(saved, list) or sorted(map(str, saved)) != sorted(names):
            what = f"{quoted(self.contents.stored[number][0])} has other parameters than the optimizer's group"
            raise make("structure_mismatch", what, self.contents.title)

    # The end

    def hand_over(self) -> None:
        """Puts objects into their containers, and gives states to the objects that they belong to."""
        for give in self.values:
            give()
        owners = self.flat.owners + (self.own.flat.owners if self.own is not None else [])
        # What is inside first.
        for owner, _, own in reversed(owners):
            hand_over(owner, own)

    def told(self) -> list[str]:
        """What to warn of."""
        return self._lines


#: After a work was made.
_PHASES = (_Work.read, _Work.hand_over)


def _setter(flat: Flat, place: int, value: Any) -> Callable[[], None]:
    home, key = flat.homes[place]

    def put() -> None:
        home[key] = value

    return put


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks, for a message: "0, 1, 4 to 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = []
    for first, last in runs:
        words += [f"{first} to {last}"] if last - first > 1 else [*range(first, last + 1)]
    return ", ".join(map(str, words[:_SHOWN])) + (" and more" if len(words) > _SHOWN else "")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(quoted, names[:_SHOWN])) + more
