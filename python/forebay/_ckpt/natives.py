"""The native objects of one run of saves: staging pools and savers by device, and the run's name and epoch in the
directory."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time

from forebay import _native
from forebay._ckpt.hints import Hints, connect
from forebay._ckpt.ranks import Ranks, describe, raise_any
from forebay._ckpt.settings import STAGING_BYTES, Settings
from forebay._ckpt.snapshot import current_device
from forebay._errors import Error, make
from forebay._options import Options, engine
from forebay._urls import bytes_of, names_in

_log = logging.getLogger("forebay")

#: How long a rank looks for what rank 0 wrote into the directory: networked file systems show new names late.
_LOOK_SECONDS = 10.0


class Natives:
    """See the module."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.run_id: str | None = None
        self.epoch: int | None = None
        self._hints: Hints | None = None
        self._savers: dict[str, _native.Saver] = {}
        self._pools: dict[str, _native.Pool] = {}

    @property
    def staging_bytes(self) -> int:
        """The size of a staging pool."""
        return self.settings.staging_bytes or STAGING_BYTES

    def open(self, run_id: str, ranks: Ranks, device: str, parent: int | None) -> None:
        """Makes a run known in the directory: claims its epoch, and sees that all ranks mean one directory. `parent`
        is the step that it goes on from. A collective call."""
        self.forget()
        self.run_id = run_id
        if self.settings.survival is not None:
            # What is claimed ends what agents finish of the run before, on all nodes.
            self.settings.survival.wait()
            ranks.exchange(None)
        error: Error | None = None
        epoch: int | None = None
        if ranks.rank == 0:
            try:
                tiers = self.settings.tiers
                farther = None if tiers is None else tiers.start()
                epoch = self.saver(device, ranks).claim(parent, farther)
            except Error as raised:
                error = raised
        if ranks.alone:
            if error is not None:
                raise error
            self.epoch = epoch
            return
        record = None if epoch is None else self._record(epoch)
        told = {"error": None, "epoch": epoch, "record": record, "who": _who(ranks)}
        answers = ranks.exchange(told)
        ranks.raise_first(error)
        self.epoch = int(answers[0]["epoch"])
        if ranks.rank:
            try:
                self._see_rank_0(str(answers[0]["record"]))
                self.saver(device, ranks)
            except Error as raised:
                error = raised
        hints = None
        if error is None:
            hints = self._open_hints(run_id, ranks, [answer["who"] for answer in answers])
        failed = None if error is None else describe(error)
        answers = ranks.exchange({"error": failed, "hints": hints is not None})
        raise_any([answer["error"] for answer in answers], ranks.rank, error)
        # A rank that cannot be heard of would pass for dead.
        if hints is not None and all(answer["hints"] for answer in answers):
            hints.start()
            self._hints = hints

    def _open_hints(self, run_id: str, ranks: Ranks, who: list[str]) -> Hints | None:
        client = connect(ranks, run_id)
        if client is None:
            return None
        try:
            return Hints(client, self.settings.directory, run_id, ranks.rank, who)
        except (Error, RuntimeError) as error:
            _log.warning("forebay: no hints between ranks: %s", error)
            return None

    @property
    def hints(self) -> _native.Hints | None:
        """What tells ranks of one another sooner, where there is something."""
        return None if self._hints is None else self._hints.native

    def _see_rank_0(self, record: str) -> None:
        """Whether the directory here is the one that rank 0 writes to: the record of its epoch is in it."""
        assert self.epoch is not None
        until = time.monotonic() + _LOOK_SECONDS
        while self._record(self.epoch) != record:
            if time.monotonic() > until:
                what = "what rank 0 wrote does not show here: the directory is not shared"
                hint = "checkpoints of several nodes need a file system that all of them mount, or a bucket"
                raise make("not_found", what, str(self.settings.directory), [hint])
            time.sleep(0.05)

    def _record(self, epoch: int) -> str | None:
        """A checksum of the record of an epoch, which has a number in it that was drawn; None where it is not there."""
        directory, folder, name = self.settings.directory, (".forebay", "epoch"), f"{epoch:08x}"
        # A look at the folder first: some networked file systems remember that a name was not there.
        if name not in names_in(directory, *folder):
            return None
        record = bytes_of(directory, *folder, name)
        return None if record is None else hashlib.sha256(record).hexdigest()

    def saver(self, device: str, ranks: Ranks) -> _native.Saver:
        """The native saver of a device."""
        found = self._savers.get(device)
        if found is None:
            assert self.run_id is not None
            found = self._savers[device] = _native.Saver(
                self.settings.directory,
                rank=ranks.rank,
                world=ranks.size,
                run_id=self.run_id,
                engine=engine(device, Options()),
                pool=self.pool(device),
                takers=self.settings.threads,
                overwrite=self.settings.overwrite,
                who=_who(ranks),
            )
        return found

    def witness(self, device: str, ranks: Ranks) -> _native.Saver:
        """A saver that is there already, or one without memory: for saves of nothing, which only tell."""
        for saver in self._savers.values():
            return saver
        assert self.run_id is not None
        own = engine(device, Options())
        pool = _native.Pool(own, 0, prewarm=False)
        return _native.Saver(
            self.settings.directory,
            rank=ranks.rank,
            world=ranks.size,
            run_id=self.run_id,
            engine=own,
            pool=pool,
            overwrite=self.settings.overwrite,
            who=_who(ranks),
        )

    def pool(self, device: str) -> _native.Pool:
        """The staging pool of a device."""
        found = self._pools.get(device)
        if found is None:
            found = self._pools[device] = _native.Pool(
                engine(device, Options()),
                self.staging_bytes,
                prewarm=self.settings.staging_bytes is not None,
            )
        return found

    def warm(self) -> None:
        """Makes the staging memory that was asked for now, where the device is known."""
        device = self.settings.device or current_device()
        if self.settings.staging_bytes is not None and device is not None:
            self.pool(device)

    def forget(self) -> None:
        """Ends the run; pools stay."""
        self.run_id = self.epoch = None
        if self._hints is not None:
            self._hints.close()
            self._hints = None
        self._savers.clear()

    def release(self) -> None:
        """Gives the pools back; a saver holds its pool."""
        self._savers.clear()
        self._pools.clear()


def _who(ranks: Ranks) -> str:
    return f"rank {ranks.rank} on {platform.node()}, process {os.getpid()}"
