"""Hints between ranks, by torch's key-value store.

Ranks could do without: the records in the checkpoint's folder are the truth, and each rank looks there from time to time.
That notices a failure that was written down within a second, and a rank that was killed after one or two minutes. Hints
make both faster, and decide nothing by themselves: what travels, and what makes a rank dead, is in the native part
(`commit/hints`). This module has the connection.

One thread carries what the native part asks the store, and the answers. It has a client of its own: a client answers
one call at a time, and that of the process group is the training loop's. It makes no collective calls, and none that
wait for a key: torch logs each such wait that ends without one.

torch's client is a Python object, so the thread needs the GIL, which training may hold for longer than others are
patient: pickling, importing, collecting garbage. Then a native thread shows in the folder that this process lives.

Where there is no such store, or it is lost, there are no hints; that is logged once. A client that has failed is not
used again, as it may be in the middle of an answer, nor is a new one made: a store whose server is gone stays so, and
torch logs each attempt at length.
"""

from __future__ import annotations

import logging
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch

from forebay import _native
from forebay._ckpt.ranks import Ranks
from forebay._urls import Place

_log = logging.getLogger("forebay")

#: How long a call of the store may take. It answers in a tenth of a millisecond.
_TIMEOUT = timedelta(seconds=10)

#: How long the thread sleeps where there is nothing to ask: it then looks whether it is needed.
_IDLE_SECONDS = 1.0

#: How long the end waits for what is left to be told.
_CLOSE_SECONDS = 2.0


class Hints:
    """This rank's side, for one run of saves."""

    def __init__(
        self, client: Any, directory: Place, run_id: str, rank: int, who: list[str]
    ) -> None:
        self.native = _native.Hints(directory, run_id=run_id, rank=rank, who=who)
        self._client = client
        self._thread: threading.Thread | None = None
        # Nobody may close what is collected as garbage.
        self._end = weakref.finalize(self, self.native.close)
        # Others may look for this rank as soon as all have come here.
        _carry(self.native, client)

    def start(self) -> None:
        """Lets the thread run, once every rank has come so far."""
        self._thread = threading.Thread(
            target=_run, args=(self.native, self._client), name="forebay-hints", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Tells the others that this rank saves no more."""
        self._end()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)


def connect(ranks: Ranks, run_id: str) -> Any:
    """A client of torch's store of this run's own; `None`, and a line in the log, where there is none."""
    server = _server(ranks.store())
    if server is None:
        _log.info("forebay: no hints between ranks: torch.distributed has no TCPStore here")
        return None
    distributed: Any = torch.distributed
    try:
        host, port = server
        client = distributed.TCPStore(host, port, None, False, _TIMEOUT, wait_for_workers=False)
        return distributed.PrefixStore(f"forebay/hints/{run_id}", client)
    except (RuntimeError, ValueError) as error:
        _log.warning("forebay: no hints between ranks: torch's store is out of reach: %s", error)
        return None


def _server(store: Any) -> tuple[str, int] | None:
    """Where the server of a store is."""
    # Prefixes are put before prefixes, a few at the most.
    for _ in range(16):
        store = getattr(store, "underlying_store", store)
    tcp = getattr(torch.distributed, "TCPStore", None)
    if tcp is None or not isinstance(store, tcp):
        return None
    return str(store.host), int(store.port)


def _run(native: _native.Hints, client: Any) -> None:
    try:
        while not native.over:
            _carry(native, client)
    except Exception as error:  # noqa: BLE001
        # What a client raises is not written down anywhere; whatever it is, the client is of no use any more.
        native.lose()
        _log.info("forebay: no more hints between ranks: torch's store is lost: %s", error)


def _carry(native: _native.Hints, client: Any) -> None:
    """One question and its answer."""
    order = native.next(_IDLE_SECONDS)
    if order is None:
        return
    what, key, value = order
    answer: object = None
    if what == "add":
        answer = client.add(key, value)
    elif what == "set":
        client.set(key, value)
    elif what == "look":
        answer = client.get(key) if client.check([key]) else None
    elif what == "read":
        answer = client.multi_get(key)
    else:
        client.delete_key(key)
    native.answer(answer)
