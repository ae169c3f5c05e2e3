"""One pass over every byte of the outputs, the end of the clock on the host device.

A host loader that maps the file has moved nothing when it returns; summing all bytes, with the same
threads for every loader, makes them comparable: the time until the weights can be computed with.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

PIECE_BYTES = 4 << 20


def _array(tensor):
    """The bytes of a torch tensor or NumPy array as the widest integers that fit."""
    import numpy as np

    if hasattr(tensor, "untyped_storage"):
        import torch

        tensor = tensor.reshape(-1).view(torch.uint8).numpy()
    flat = tensor.reshape(-1).view(np.uint8)
    if flat.ctypes.data % 8 or flat.size % 8:
        return flat
    return flat.view(np.int64)


def every_byte(out: dict, threads: int) -> int:
    pieces = []
    for tensor in out.values():
        flat = _array(tensor)
        step = PIECE_BYTES // flat.itemsize
        pieces += [flat[at : at + step] for at in range(0, flat.size, step)]

    def total(start: int) -> int:
        return sum(int(piece.sum()) for piece in pieces[start::threads])

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(total, range(threads)))
