"""Jobs that are killed with signal 9 at a random moment: what was committed is there, and the next life goes on."""

from __future__ import annotations

import os
import random
import secrets
from pathlib import Path

import pytest
from crash import folder, launch
from crash.job import Life, bereave, live, step_of

#: Runs in all, and those of them that are made every time.
RUNS, EVERY_TIME = 50, 4

#: A run is made again with the seed that it printed.
SEED = int(os.environ.get("FOREBAY_CRASH_SEED") or secrets.randbits(32))

#: Ranks, by the number of the run.
WORLDS = (1, 2, 1, 4, 1)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n < EVERY_TIME else [pytest.mark.slow]) for n in range(RUNS)],
)
def test_a_killed_job_leaves_its_last_commit_and_the_next_life_goes_on(
    tmp_path: Path, number: int
) -> None:
    seed = SEED + number
    chance = random.Random(seed)
    world = WORLDS[number % len(WORLDS)]
    pruning = number % 3 == 2
    print(f"FOREBAY_CRASH_SEED={SEED}, run {number}: {world} ranks, pruning {pruning}")
    life = Life(str(tmp_path), prune_every=3 if pruning else 0)
    begun: set[int] = set()
    reported: set[int] = set()
    last: int | None = None
    # Two lives are killed, the second of which has resumed from what the first one left.
    for _ in range(2):
        with launch.Job(live, world, life) as job:
            _kill_some_time(job, chance, world, pruning)
            begun |= set(job.told("began"))
            reported |= set(job.told("committed"))
            assert job.told("restored") == [last] * (world if last is not None else 0)
        last = folder.check(tmp_path, begun, reported, world)
        print(f"save {max(begun)} was the last to begin, {last} is the last that is committed")
    again = launch.run(live, world, Life(str(tmp_path), saves=3))
    begun |= set(again.told("began"))
    reported |= set(again.told("committed"))
    newest = folder.check(tmp_path, begun, reported, world)
    assert newest == (last or 0) + 3
    folder.collect(tmp_path)
    assert folder.check(tmp_path, begun, {newest}, world) == newest


@pytest.mark.slow
def test_ranks_that_outlive_one_are_told_who_it_was(tmp_path: Path) -> None:
    with launch.Job(bereave, 3, str(tmp_path)) as job:
        job.listen()
        assert not job.told("raised"), job.reports
        ended = job.told("ended")
    assert len(ended) == 2
    for code, text, seconds in ended:
        # It was silent for a lease; or it never came, for those that look before the lease has run out.
        assert code in ("timeout", "not_shared") and "rank 1" in text, text
        assert seconds < 150
    assert folder.committed(tmp_path) == [step_of(2)]
    assert folder.check_step(tmp_path, step_of(2)) == 2


def _kill_some_time(job: launch.Job, chance: random.Random, world: int, pruning: bool) -> None:
    """One rank, and soon the others, as a launcher does; or all at once."""
    count = chance.randint(1, 4) * world
    what = "pruning" if pruning and chance.random() < 0.7 else "began"
    seen = 0

    def is_time(report: launch.Report) -> bool:
        nonlocal seen
        seen += report[1] == what
        return seen >= (world if what == "pruning" else count) or report[1] == "raised"

    assert job.listen(is_time), job.reports
    delay = chance.uniform(0, 5.0 if what == "pruning" else 0.4)
    job.drain(delay)
    assert not job.told("raised") and not job.told("failed"), job.reports
    everyone = list(range(world))
    alone = world > 1 and chance.random() < 0.5
    first = [chance.choice(everyone)] if alone else everyone
    print(f"killed ranks {first} {delay:.3f} s after report {seen} of {what!r}")
    job.kill(first)
    if alone:
        job.drain(chance.uniform(0, 0.5))
        job.kill([rank for rank in everyone if rank not in first])
    # What they told before they died.
    job.listen()
