"""Planning without the garbage collector.

A plan of many tensors is many small objects, hardly any of which is dropped again: the collector would go through all
of them several times in vain, which takes longer than the plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps the garbage collector from running; inside of another one it changes nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
