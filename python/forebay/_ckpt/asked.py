"""What a save was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay._ckpt.settings import parse_step
from forebay._ckpt.sidefiles import SideFiles, listed
from forebay._ckpt.training import Owned


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The arguments of a save; see `Checkpointer.save`."""

    step: Any
    state: Any
    per_rank: Any
    side_files: SideFiles | None
    blocking: bool
    #: Whether it may return before the memory was copied, and if hooks see to that, which memory those answer for.
    overlap: bool
    owned: Owned | None = None

    def checked(self) -> tuple[int | None, list[tuple[str, bytes]], Exception | None]:
        """The step, None if it is none; the side files; and what is wrong with them, for all ranks to hear of."""
        step = None
        try:
            step = parse_step(self.step)
            return step, listed(self.side_files), None
        except Exception as error:
            return step, [], error
