"""`Checkpointer`."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch

from forebay import _native
from forebay._catalog import PathLike
from forebay._ckpt import restoring
from forebay._ckpt.agents import AgentLike
from forebay._ckpt.asked import Asked
from forebay._ckpt.choosing import Choice, choose
from forebay._ckpt.handle import SaveHandle
from forebay._ckpt.life import next_key, remember
from forebay._ckpt.preempt import LEAD_STEPS, Preemption
from forebay._ckpt.ranks import Ranks
from forebay._ckpt.reading import load_rank, side_files
from forebay._ckpt.restorereport import RestoreReport
from forebay._ckpt.restoring import Request
from forebay._ckpt.retention import (
    GRACE_SECONDS,
    LEFTOVER_SECONDS,
    Retention,
    collect,
    prune,
)
from forebay._ckpt.saving import Run
from forebay._ckpt.settings import OnBusy, Progress, parse, parse_step
from forebay._ckpt.sidefiles import SideFiles
from forebay._ckpt.tiers import Tiers, TiersLike
from forebay._ckpt.tiertrouble import Troubles
from forebay._ckpt.training import Attached, Owned, Training
from forebay._errors import Error, make, usage
from forebay._urls import Place

_log = logging.getLogger("forebay")

#: Errors of a restore that another copy would not mend.
_NOT_OF_A_COPY = ("usage", "structure_mismatch", "cancelled", "out_of_memory")


class Checkpointer:
    """Saves and restores the state of a training job, in folders that stock `torch.distributed.checkpoint` reads.

        checkpoints = forebay.Checkpointer("runs/7", keep_last=3)
        state = {"model": model, "optim": optimizer, "epoch": 0}
        if checkpoints.latest() is not None:
            report = checkpoints.restore(state)
        for step in ...:
            ...
            if step % 100 == 0:
                checkpoints.save(step, state)

    Every rank of the process group makes one and calls the same methods with the same arguments. Collective calls are
    made by the first save of a structure and by restores, on the calling thread, and by nothing else.

    Args:
        directory: where the steps are, a folder each; shared by all ranks. May be the URL of a bucket.
        staging_bytes: memory that a save is copied into before it goes to the disk ("8GB" or a number), made at once
            where the device is known. By default up to 1 GiB, as it is needed. Where it is smaller than the state of a
            rank, the copies wait for the disk.
        shadow: whether a save first copies the state within GPU memory, so that training goes on after milliseconds:
            "auto" does if there is room above the peak use so far. That is known once training has taken a step: after
            `prepare`, where a hook of `attach` has run, or from the second save on.
        process_group: the ranks that save together; by default all.
        on_busy: what a save does that finds the last one still under way: "wait" for it, "skip" itself, or "supersede"
            it.
        keep_last, keep_every: which steps stay when a new one is committed: the last so many, and those whose number
            is a multiple. Without either all stay.
        threads: files that a rank writes at a time.
        overwrite: whether a save may replace a step that is committed. The old one stays until the new one is.
        progress: called with (bytes done, bytes in all) during restores.
        device: the device of the state ("cuda:0", "cpu"), where it is to be known before the first save.
        state: a state like those that will be saved. Then rates are measured, and how long a save will hold up
            training is logged and kept in `predicted_stall_s`. What memory was asked for by size or name is made now:
            `staging_bytes`, and with `shadow=True` the shadow. Other memory is made as saves, or `prepare`, need it.
        tiers: where steps go from `directory`, by themselves: places, the nearest first, or a dict for one
            (`{"place": "s3://...", "takes": "every 1000"}`), or the path of a `forebay.toml` whose first tier is `directory`.
            Rank 0 moves them, in threads of its own; saves wait for room on the first tier, or are left out, as is said
            there; "latest" and numbers mean the nearest copy that verifies, of all tiers. What stays is said in the tiers.
            At the end of the job what is not moved yet stays for the next, `drain`, or an agent.
        agent: hand `directory` to the agent of this machine (`forebay agent`), which moves what is saved there to its own
            tiers, whatever becomes of this process: True for the one of the configuration, or the path of its socket. If
            none answers that is a warning, every save tries again, and `tier_status` says it. `tiers` then say where else
            "latest" and restores look, and when a save has room; nothing is moved in this process.
        agent_job: what the agent calls the job; by default as the directory. Copies are below that name in each tier.
        records: for a `directory` on each node's own drive: a place that all nodes share, where it is agreed what was
            saved. Each node keeps its own ranks' files, one of its processes, or its agent, moves them to the next tier,
            where a step is committed when all nodes have brought theirs. A restore waits for that, and reads what its node
            has from there.
        survive: with `agent`: a save that has returned is finished by the agents of the job's nodes if its processes die. It
            is copied into host memory that the agent has too, as much as this rank's share of the state, kept from save
            to save; no GPU memory is taken. A job that starts again waits for what its agent is finishing. Where the
            memory or the agent cannot be had, that is a warning, and saves are as without. For saves that do not block.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        staging_bytes: int | str | None = None,
        shadow: bool | Literal["auto"] = "auto",
        process_group: Any = None,
        on_busy: OnBusy = "wait",
        keep_last: int | None = None,
        keep_every: int | None = None,
        threads: int | None = None,
        overwrite: bool = True,
        progress: Progress | None = None,
        device: object = None,
        state: Any = None,
        tiers: TiersLike | None = None,
        agent: AgentLike = False,
        agent_job: str | None = None,
        records: PathLike | None = None,
        survive: bool = False,
    ) -> None:
        self._settings = parse(
            directory,
            staging_bytes,
            shadow,
            process_group,
            on_busy,
            keep_last,
            keep_every,
            threads,
            overwrite,
            progress,
            device,
            tiers,
            agent,
            agent_job,
            records,
            survive,
        )
        self._pid = os.getpid()
        #: The last step restored or committed.
        self._parent: int | None = None
        self._run: Run | None = None
        #: One save after the other begins, from whatever thread. One that a signal's handler makes is not held up.
        self._saves = threading.RLock()
        self._retention: Retention | None = None
        self._troubles = Troubles()
        self._training = Training()
        self._hooks: list[Attached] = []
        store = weakref.WeakMethod(self._store)
        self._preemption = Preemption(
            lambda: _called(store), next_key(str(self._settings.directory))
        )
        self._ranks_kept: Ranks | None = None
        #: Seconds that a save of the `state` given will hold up training; None if none was given.
        self.predicted_stall_s: float | None = None
        remember(self)
        if self._settings.agent is not None and self._hands_over():
            self._settings.agent.introduce()
            if self._settings.tiers is None:
                self._settings.agent.tell_elsewhere()
        if state is not None:
            self._prepare(state, stepped=False)
        elif self._settings.staging_bytes is not None:
            self._opened().natives.warm()

    def prepare(self, state: Any) -> float | None:
        """Makes memory ready for saves of a state, so that the first holds up training no longer than later ones do;
        returns the predicted stall in seconds, None where it is not known. To be called after the first full step of
        training, when the peak use of GPU memory is known. Not a collective call; `state` is not changed."""
        self._check_process()
        self._prepare(state, stepped=True)
        return self.predicted_stall_s

    def _prepare(self, state: Any, stepped: bool) -> None:
        with self._saves:
            mode, seconds = self._opened().prepare(state, stepped)
        self.predicted_stall_s = seconds
        # A stall that is felt is worth a line that is seen.
        level = logging.WARNING if mode == "stream" else logging.INFO
        _log.log(
            level, "forebay: saves hold up training for %.3f s each (%s)", seconds or 0.0, mode
        )

    # Saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        blocking: bool = False,
        per_rank: Mapping[str, Any] | None = None,
        side_files: SideFiles | None = None,
        overlap: bool | None = None,
    ) -> SaveHandle:
        """Saves a state: nested dicts and lists of tensors, modules, optimizers and whatever can be pickled.

        Returns when the state may be changed again; bytes go to the disk behind that. With `overlap` it returns at
        once, and the state may be changed once `handle.staged()` says so. After `attach` that is so by default for
        what attached optimizers change, whose hooks wait just before their next step; all else is copied before. With
        `blocking` it returns when the step is committed.

        An exception that interrupts the call, Ctrl-C say, gives the save up, as long as it reads the state's memory.

        Args:
            step: the number of the step.
            state: tensors may be on GPUs or the host, DTensors on any mesh, or shards that say what they are. What
                ranks hold alike is written by one of them. Tied tensors are stored once.
            per_rank: what belongs to this rank alone: generators, data loaders.
            side_files: more files for the step's folder, by name; those of rank 0 count.

        Raises:
            forebay.Error: on every rank the same, named after the rank that had it; what goes wrong later is raised by
                `handle.wait()`.
        """
        self._check_process()
        overlapped = bool(self._hooks) if overlap is None else overlap
        owned = None
        if overlap is None and overlapped and not blocking:
            owned = Owned(hook.optimizer for hook in self._hooks)
        asked = Asked(step, state, per_rank, side_files, blocking, overlapped, owned)
        with self._saves:
            return self._opened().save(asked)

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Lets saves return before the state was copied: a hook waits for that just before the optimizer's next step,
        so that copies overlap the forward and backward pass. Returns the hook, whose `remove()` undoes it.

        That goes for the optimizer's parameters and the tensors that it keeps for each, which nothing else may change
        meanwhile. Saves copy everything else before they return: buffers, averaged weights, parameters of optimizers
        that are not attached. Where that is more than 1 GiB a rank, they wait until all is copied."""
        self._check_process()
        if not callable(getattr(optimizer, "register_step_pre_hook", None)):
            what = f"attach takes an optimizer, not {type(optimizer).__name__}"
            raise usage(what, "what changes the saved tensors is its step: attach(optimizer)")
        hook = optimizer.register_step_pre_hook(self._training.before_step)
        return Attached(self._hooks, optimizer, hook)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the save under way; False after `timeout` seconds. Raises its error."""
        last = None if self._run is None else self._run.last
        return last is None or last.wait(timeout)

    # Restoring

    def restore(
        self,
        state: Any,
        step: int | PathLike | Literal["latest"] = "latest",
        *,
        strict: bool = True,
        per_rank: dict[str, Any] | None = None,
        weights_only: bool = True,
    ) -> RestoreReport:
        """Fills a state from a committed step, after the end of the save under way. A collective call.

        Tensors are filled where they are, from whatever ranks and meshes they were saved; other values are replaced in
        their dicts and lists; what has `load_state_dict` is given its state, optimizers also before their first step.

        Args:
            state: built like the one that was saved, or part of it.
            step: its number, or "latest": the newest that is committed, the same on all ranks. Or a folder that is a
                checkpoint itself, of torch or `forebay.dcp`, wherever it is.
            strict: every name of the state must be in the checkpoint, and every name that the checkpoint has under the
                state's own top-level keys in the state; so for `per_rank` on ranks that saved something. Otherwise they
                are only reported, and an optimizer that gets nothing is a warning.
            per_rank: a dict for what this rank saved as its own. `{}` is filled with all of it. Otherwise it is built as
                it was saved: tensors are filled, other values replaced, objects given their state; `None` or an empty
                dict inside gets whatever was saved there. Not given, nothing of it is restored, which is a warning. On
                more ranks than saved, those that saved nothing get nothing, and a warning; on fewer, the report says
                which ranks' values are left: `Checkpointer.per_rank` reads any of them.
            weights_only: refuse pickled classes that are not known to be harmless, as `torch.load` does.

        Raises:
            forebay.Error: on every rank the same. Tensors then hold garbage; nothing was given to `load_state_dict`.
        """
        self._check_process()
        if self._run is not None:
            # What it still reads is about to be overwritten.
            self._run.finish(4)
        ranks = self._ranks()
        self._await_agent()
        if self._settings.survival is not None:
            # Those of all nodes.
            ranks.exchange(None)
        directory = self._settings.directory
        chosen = choose(directory, step, ranks, self._settings.tiers)
        request = Request(
            state,
            per_rank,
            strict,
            weights_only,
            self._settings.threads,
            self._settings.progress,
        )
        report = self._restored(request, ranks, chosen)
        tiers = self._settings.tiers
        own = [directory] if tiers is None else tiers.places
        if chosen.folder in own and chosen.step is not None:
            self._parent = chosen.step
            if self._run is not None:
                self._run.rebase(chosen.step)
        return report

    @staticmethod
    def _restored(request: Request, ranks: Ranks, chosen: Choice) -> RestoreReport:
        try:
            return restoring.restore(request, ranks, chosen)
        except Error as error:
            # The same on all ranks.
            if chosen.nearer is None or error.code in _NOT_OF_A_COPY:
                raise
            what = "what nodes have on their own drives is passed over"
            warnings.warn(f"{what}, all is read from {chosen.folder}: {error}", stacklevel=4)
        return restoring.restore(request, ranks, replace(chosen, nearer=None))

    def per_rank(
        self,
        step: int | Literal["latest"] = "latest",
        rank: int | None = None,
        *,
        weights_only: bool = True,
    ) -> dict[str, Any]:
        """What a rank saved as its own, by default this one; empty if it saved nothing. Not a collective call."""
        self._check_process()
        chosen = self._ranks().rank if rank is None else rank
        return load_rank(
            *self._found(step),
            chosen,
            weights_only,
            self._settings.threads,
        )

    def side_files(self, step: int | Literal["latest"] = "latest") -> dict[str, bytes]:
        """The files that were committed with a step, by name. Not a collective call."""
        self._check_process()
        return side_files(*self._found(step))

    def _found(self, step: object) -> tuple[Place, int]:
        """Where a step is, or the newest, and its number."""
        self._await_agent()
        tiers, number = self._settings.tiers, None if step == "latest" else parse_step(step)
        if tiers is not None:
            return tiers.nearest(number)[:2]
        number = self.latest() if number is None else number
        if number is None:
            raise make("not_found", "no step is committed", str(self._settings.directory))
        return self._settings.directory, number

    # The directory

    def latest(self) -> int | None:
        """The newest committed step of the newest run. Ranks that ask at different times may see different ones."""
        self._check_process()
        self._await_agent()
        if self._settings.tiers is None:
            return _native.latest(self._settings.directory)
        on_drives = self._settings.tiers.lacking(None)
        if on_drives is not None:
            return on_drives.step
        try:
            return self._settings.tiers.nearest(None)[1]
        except Error as error:
            if error.code == "not_found":
                return None
            raise

    def steps(self) -> list[dict[str, Any]]:
        """All steps: number, state ("committed", "pending", "removed", "lost", "dead"), age in seconds, bytes, ranks.

        In a bucket commits are listed and not read, so `damage` of their records is not told there; `forebay ckpt verify`
        finds it, and `restore` of "latest" reads the step that it takes."""
        self._check_process()
        directory = self._settings.directory
        return _native.steps(directory) if directory.is_dir() else []

    def prune(
        self,
        keep_last: int | None = None,
        keep_every: int | None = None,
        *,
        pins: tuple[int, ...] = (),
        grace_s: float = GRACE_SECONDS,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Removes committed steps that no rule keeps, by default the rules of this checkpointer; returns what was
        removed, or would be. The newest step stays. To be called by one rank.

        Args:
            grace_s: how long what is removed is kept for readers that have just opened it, and how long a save must have
                been silent to count as dead: not below a minute while anybody saves."""
        self._check_process()
        return prune(self._settings, keep_last, keep_every, pins, grace_s, dry_run)

    def gc(
        self, *, grace_s: float = LEFTOVER_SECONDS, dry_run: bool = False
    ) -> list[tuple[str, int]]:
        """Removes what saves left that did not end, and what overwritten steps were made of, once it is `grace_s`
        seconds old; returns names and bytes of what was removed, or would be. Happens by itself, on rank 0, beside
        saves. To be called by one rank."""
        self._check_process()
        return collect(self._settings, grace_s, dry_run)

    # Tiers

    def tier_status(self) -> dict[str, Any]:
        """How the tiers stand: what `forebay tier status --json` has. With an agent it is asked, and `agent` says how far
        the directory was handed over: `socket`, `job`, `places`, `error`. To be called by rank 0."""
        self._check_process()
        agent, tiers = self._settings.agent, self._settings.tiers
        if agent is None:
            return self._tiers().status()
        told = agent.status()
        if told["tiers"] or tiers is None:
            return told
        # What this process sees itself.
        return {**tiers.status(), "agent": told["agent"]}

    def drain(self, timeout: float = 3600.0) -> bool:
        """Waits until every committed step is where it should be, after the end of the save under way; False if that takes
        longer, or copies that should go cannot be removed. To be called by rank 0; with `records` by all ranks, each of
        which may be who moves, or hands over, what its node has."""
        self._check_process()
        agent = self._settings.agent
        tiers = self._tiers() if agent is None else None
        self.wait()
        if agent is not None:
            newest = _native.latest(self._settings.directory)
            asks = self._ranks().rank == 0 or self._hands_over()
            return not asks or agent.drain(newest, timeout)
        assert tiers is not None
        return tiers.drain(timeout, self._ranks().rank == 0)

    def pause_tiers(self, paused: bool = True) -> None:
        """Lets nothing more in or out of tiers, or goes on: for phases in which the network belongs to others. What is
        under way stops within one part. Of an agent that is so for all of its jobs. To be called by rank 0."""
        self._check_process()
        action = {"action": "pause" if paused else "resume"}
        if self._settings.agent is not None:
            self._settings.agent.act(action)
            return
        self._tiers().act(action, "Checkpointer")

    def _tiers(self) -> Tiers:
        self._check_process()
        if self._settings.tiers is None:
            raise usage("this Checkpointer has no tiers", "Checkpointer(..., tiers=[...])")
        return self._settings.tiers

    # The end of a job

    def on_signal(
        self, number: int = signal.SIGTERM, *, grace_s: float = 30.0, lead_steps: int = LEAD_STEPS
    ) -> None:
        """Takes a signal as the order to save and end: see `preempted`. Every rank calls it, from the main thread. A
        handler that was there before is called as well, but for those that end the process.

        Args:
            grace_s: seconds from the signal to the end of the process.
            lead_steps: how many steps ranks may be apart when they call `preempted`: one where each step waits for all
                (gradients are reduced), more where ranks run on alone. The job ends so many steps, and one, after the
                first rank that asks after its signal; the last step must be saved within the grace time.
        """
        self._check_process()
        self._preemption.listen(number, grace_s, lead_steps)

    def preempted(self, step: int) -> bool:
        """Whether this step is the last, because a rank was signalled: the same answer for the same step on all ranks,
        which agree through torch's store. To be called by every rank after each step, or after the same steps on all; then
        save with `blocking=True` and end."""
        self._check_process()
        return self._preemption.asked(parse_step(step))

    def grace_left(self) -> float | None:
        """Seconds left of the grace time; None before a signal came to this rank."""
        return self._preemption.left()

    def release(self) -> None:
        """Gives back staging and shadow memory once no save needs it; the next save takes some again."""
        self._check_process()
        if self._run is not None:
            self._run.release()

    def close(self, timeout: float | None = None) -> bool:
        """Waits for the save under way and gives everything back; False if it still runs after `timeout` seconds. A
        save after that starts anew.

        Raises the error of the last save, if it failed and nobody has asked for that: a job that ends well has its last
        step. Everything was given back then. At the end of a `with` that an exception ends, it is a warning instead."""
        over, error = self._end(timeout)
        if error is not None:
            raise error
        return over

    def _end(self, timeout: float | None) -> tuple[bool, Error | None]:
        """Ends everything; whether that was possible in time, and the error of the last save that nobody has seen."""
        if self._pid != os.getpid():
            return True, None
        error = None
        if self._run is not None:
            if not self._run.close(timeout):
                return False, None
            self._parent = self._run.parent
            error = self._run.failure()
        self._run = self._training.handle = None
        if self._retention is not None:
            self._retention.close(timeout)
            self._retention = None
        if self._settings.tiers is not None:
            self._settings.tiers.close()
        for hook in list(self._hooks):
            hook.remove()
        self._preemption.close()
        self._ranks_kept = None
        return True, error

    def _exit(self, timeout: float) -> None:
        """The end of the process. The error of the last save is in the log."""
        self._end(timeout)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
            return
        _, failed = self._end(None)
        if failed is not None:
            warnings.warn(f"the last save failed: {failed}", stacklevel=2)

    def __reduce__(self) -> Any:
        raise usage("a Checkpointer cannot be pickled", "make one in each process")

    def __repr__(self) -> str:
        return f"<Checkpointer {str(self._settings.directory)!r}>"

    # Inside

    def _await_agent(self) -> None:
        """Waits until the agent has finished what processes of the job have staged that are dead."""
        if self._settings.survival is not None:
            self._settings.survival.wait()

    def _ranks(self) -> Ranks:
        if self._run is not None and not self._run.ranks.stale:
            return self._run.ranks
        if self._ranks_kept is None or self._ranks_kept.stale:
            self._ranks_kept = Ranks(self._settings.process_group)
        return self._ranks_kept

    def _opened(self) -> Run:
        if self._run is None:
            self._run = Run(self._settings, self._after, self._training)
            self._run.parent = self._parent
        return self._run

    def _after(self, handle: SaveHandle) -> None:
        """What follows a save, on the watching thread."""
        if handle._error is not None:
            level = logging.INFO if handle.cancelled else logging.ERROR
            _log.log(level, "forebay: the save of step %d: %s", handle.step, handle._error)
            return
        run, agent, tiers = self._run, self._settings.agent, self._settings.tiers
        if tiers is not None:
            try:
                tiers.attend(run is not None and run.ranks.rank == 0)
            except Error as error:
                _log.error("forebay: what this node has is not moved: %s", error)
        if agent is not None and self._hands_over():
            agent.hand_over()
        if run is not None and run.ranks.rank == 0:
            if agent is None and tiers is not None:
                tiers.wake()
            self._troubles.see(tiers, agent)
            if self._retention is None:
                self._retention = Retention(self._settings)
            self._retention.ask()

    def _hands_over(self) -> bool:
        """Whether this process deals with the agent: rank 0, or on the drives of nodes one process of each."""
        tiers = self._settings.tiers
        if tiers is not None and tiers.node is not None:
            return tiers.node.takes_charge()
        return self._ranks().rank == 0

    def _store(self) -> Any:
        store = self._ranks().store()
        return None if self._ranks().alone else store

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            what = "this Checkpointer was made before a fork, in the parent"
            raise make("forked", what, None, ["make one in the child"])


def _called(method: weakref.WeakMethod[Any]) -> Any:
    """What a method returns; None where its object is gone."""
    found = method()
    return None if found is None else found()
