"""Devices as callers name them."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from typing import Any

from forebay._errors import make, usage
from forebay._frameworks import Framework, Numpy, Torch, have_torch

_KNOWN = "say 'cpu', 'cuda', 'cuda:N', a number, a torch.device, or 'host' for numpy arrays"


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors are made and what makes them."""

    #: The device's name for the engine.
    engine: str
    framework: Framework


def parse(device: object, framework: str | None = None) -> Place:
    """Reads a device. `framework` is "pt" or "np" where the caller insists on one.

    `host` is numpy; `cpu` is torch where it is installed and numpy elsewhere.

    Errors: `usage`, `no_device`; `forked` for a GPU in the child of a fork whose parent used it.
    """
    name = _name_of(device)
    if name == "host" or (name == "cpu" and framework == "np"):
        if framework == "pt":
            raise usage("device 'host' means numpy arrays", "say 'cpu' for torch tensors")
        return Place("host", Numpy())
    if name == "cpu":
        if not have_torch():
            if framework == "pt":
                raise make("unsupported", "torch is not installed", None, ["say framework='np'"])
            return Place("host", Numpy())
        return Place("host", Torch(importlib.import_module("torch").device("cpu")))
    if framework == "np":
        raise usage(f"numpy arrays cannot be on {name}", "say device='cpu' or framework='pt'")
    return _cuda(name)


def _name_of(device: object) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(device, torch.device):
        device = str(device)
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    if not isinstance(device, str) or not re.fullmatch(r"cpu|host|cuda(:\d{1,4})?|cpu:0", device):
        raise usage(f"no device is called {device!r}", _KNOWN)
    return "cpu" if device == "cpu:0" else device


def _cuda(name: str) -> Place:
    if not have_torch():
        hint = "install torch with CUDA, or say device='host'"
        raise make("unsupported", f"tensors on {name} need torch", None, [hint])
    torch: Any = importlib.import_module("torch")
    if torch.cuda._is_in_bad_fork():
        what = f"{name} cannot be used in the child of a fork: the parent had used CUDA before"
        hint = "start processes with the 'spawn' or 'forkserver' method"
        raise make("forked", what, None, [hint])
    if not torch.cuda.is_available():
        hint = "see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES; torch.cuda.is_available() is False"
        raise make("no_device", f"no GPU that torch can use, {name} was asked for", None, [hint])
    _, _, digits = name.partition(":")
    # Without a number it is torch's current device; nothing here makes a context on another one.
    ordinal = int(digits) if digits else torch.cuda.current_device()
    count = torch.cuda.device_count()
    if ordinal >= count:
        what = f"no GPU {ordinal}, torch sees {count}"
        raise make("no_device", what, None, ["see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES"])
    # torch and the driver count alike: both obey CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    return Place(f"cuda:{ordinal}", Torch(torch.device("cuda", ordinal)))
