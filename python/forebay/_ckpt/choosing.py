"""Which step a restore reads: the same on all ranks."""

from __future__ import annotations

from pathlib import Path

from forebay import _native
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.settings import parse_step
from forebay._errors import Error, make


def choose(directory: Path, step: object, ranks: Ranks) -> int:
    """The step to restore, the same on all ranks. A collective call. Errors: `not_found`, `not_committed`, `usage`."""
    error: Error | None = None
    chosen = -1
    try:
        if step == "latest":
            chosen = _latest(directory) if ranks.rank == 0 else -1
        else:
            chosen = parse_step(step)
            if ranks.rank == 0:
                # Refuses what is not committed, with what is there.
                _native.read_lease(directory, chosen)
    except Error as raised:
        error = raised
    if ranks.alone:
        if error is not None:
            raise error
        return chosen
    answers = ranks.exchange({"error": None, "step": chosen, "named": step != "latest"})
    ranks.raise_first(error)
    first = int(answers[0]["step"])
    for rank, answer in enumerate(answers):
        if answer["named"] != answers[0]["named"] or (answer["named"] and answer["step"] != first):
            what = f"rank 0 restores step {first}, rank {rank} asked for step {answer['step']}"
            raise make("structure_mismatch", what, str(directory))
    return first


def _latest(directory: Path) -> int:
    found = _native.latest(directory)
    if found is not None:
        return int(found)
    steps = _native.steps(directory) if directory.is_dir() else []
    left = ", ".join(f"{one['step']} ({one['state']})" for one in steps[-20:])
    hint = f"there are only leftovers: {left}" if left else "is it the right folder?"
    raise make("not_found", "no step is committed", str(directory), [hint])
