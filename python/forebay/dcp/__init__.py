"""Storage of `torch.distributed.checkpoint` by Forebay.

    import torch.distributed.checkpoint as dcp
    from forebay.dcp import Reader, Stager, Writer

    dcp.save(state, storage_writer=Writer("runs/7/step-100"))
    dcp.load(state, storage_reader=Reader("runs/7/step-100"))
    future = dcp.async_save(state, storage_writer=Writer("runs/7/step-200"), async_stager=stager)

Folders are stock ones: plain `dcp.load` reads what `Writer` wrote, and `Reader` reads what stock writers wrote, ranges
of it where the state is cut otherwise. Planning and collective calls are torch's own; `forebay.Checkpointer` has
neither from the second save on.
"""

from forebay.dcp._reader import Reader
from forebay.dcp._stager import Stager
from forebay.dcp._writer import Writer

__all__ = ["Reader", "Stager", "Writer"]
