"""The loaders under test, each behind one small class.

A runner imports its library in `prepare`, before the clock; `load` opens the files and returns
`{name: tensor}` with every tensor in its place or on its way there (the worker synchronizes before
it stops the clock); `release` lets go of whatever keeps the outputs alive. The calls follow the
sources of the versions that docs/BENCHMARKS.md names. The best settings of each peer for a kind of
storage are in `presets`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Spec:
    """A runner: `KIND[=LABEL][:key=value,...]`; `env.NAME=value` sets a variable."""

    kind: str
    options: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    label: str = ""
    site: str = ""

    @classmethod
    def parse(cls, text: str) -> "Spec":
        head, _, tail = text.partition(":")
        kind, _, label = head.partition("=")
        if kind not in RUNNERS:
            raise SystemExit(f"unknown runner {kind!r}; known: {', '.join(RUNNERS)}")
        spec = cls(kind, label=label)
        for item in filter(None, tail.split(",")):
            key, sep, value = item.partition("=")
            if not sep:
                raise SystemExit(f"runner option {item!r} is not key=value")
            if key.startswith("env."):
                spec.env[key[4:]] = value
            elif key == "site":
                spec.site = value
            else:
                spec.options[key] = value
        spec.site = spec.site or RUNNERS[kind].site
        spec.label = spec.label or " ".join([kind] + tail.replace("env.", "").split(",")).strip()
        return spec

    @property
    def is_peer(self) -> bool:
        return not self.kind.startswith(("forebay", "raw-", "alloc"))

    @property
    def is_raw(self) -> bool:
        return self.kind.startswith(("raw-", "alloc"))


class Runner:
    package = ""
    site = "peers"
    verifies = True

    def __init__(self, options: dict[str, str], device: str, folder: Path, files: list[Path]):
        self.options, self.device, self.folder = dict(options), device, folder
        self.files = [str(f) for f in files]
        self.cuda = device.startswith("cuda")

    def number(self, key: str, default: int) -> int:
        return int(self.options.get(key, default))

    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.package) if self.package else None
        except importlib.metadata.PackageNotFoundError:
            return "not installed as a package"

    def prepare(self) -> None: ...
    def load(self) -> dict: ...
    def report(self) -> dict | None: ...
    def release(self) -> None: ...


class Forebay(Runner):
    """Options go to `load_file`: as one `options` dictionary, or by name where it takes them so."""

    package = "forebay"
    site = "forebay"
    NAMES = {"path": ("path_mode", "mode"), "cache": ("cache_mode",)}

    def prepare(self):
        import forebay

        self.forebay = forebay
        options = {k: _value(v) for k, v in self.options.items()}
        self.arguments = {"options": options} if options else {}
        try:
            takes = inspect.signature(forebay.load_file).parameters
        except (TypeError, ValueError):
            return
        any_name = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        if options and "options" not in takes:
            self.arguments = {self._name(k, takes, any_name): v for k, v in options.items()}

    def _name(self, key, takes, any_name):
        first = next(iter(takes), None)
        for name in (key, *self.NAMES.get(key, ())):
            if name in takes and name != first:
                return name
        if any_name:
            return key
        raise TypeError(f"forebay.load_file takes no {key!r}")

    def load(self):
        return self.forebay.load_file(str(self.folder), device=self.device, **self.arguments)

    def report(self):
        last = getattr(self.forebay, "last_report", None)
        found = last() if callable(last) else None
        return found if found is None or isinstance(found, dict) else {"text": str(found)}


def _value(text: str):
    low = text.lower()
    if low in ("true", "false"):
        return low == "true"
    try:
        return int(text)
    except ValueError:
        return text


class Safetensors(Runner):
    """`safetensors.torch.load_file` shard after shard; `backend=mmap|pread`."""

    package = "safetensors"
    site = "safetensors"

    def prepare(self):
        from safetensors.torch import load_file

        self.load_file = load_file
        self.arguments = {k: v for k, v in self.options.items() if k == "backend"}

    def load(self):
        out = {}
        for file in self.files:
            out.update(self.load_file(file, device=self.device, **self.arguments))
        return out


class SafetensorsPrefetch(Runner):
    """0.9.0rc1's CUDA engine: all shards started together, `threads` readers each."""

    package = "safetensors"
    site = "safetensors090"

    def prepare(self):
        from safetensors import safe_open

        self.safe_open, self.threads, self.loaders = safe_open, self.number("threads", 8), []

    def load(self):
        handles = [self.safe_open(f, framework="pt", device=self.device) for f in self.files]
        self.loaders = [h.prefetch(device=self.device, threads=self.threads) for h in handles]
        out = {}
        for loader in self.loaders:
            for name, tensor in loader:
                out[name] = tensor
        return out

    def release(self):
        for loader in self.loaders:
            loader.close()
        self.loaders = []


class FastSafetensors(Runner):
    """`ParallelLoader` without GDS (outputs cloned, its default); `mode=files` is the file loader,
    all shards at once, whose tensors share the shard's own device block."""

    package = "fastsafetensors"

    def prepare(self):
        import fastsafetensors

        self.module, self.held = fastsafetensors, []
        self.common = {"device": self.device, "nogds": True,
                       "max_threads": self.number("threads", 16),
                       "bbuf_size_kb": self.number("bbuf_kb", 16 * 1024)}

    def load(self):
        return self._files() if self.options.get("mode") == "files" else self._parallel()

    def _parallel(self):
        loader = self.module.ParallelLoader(
            None, list(self.files), use_tqdm_on_load=False,
            queue_size=self.number("queue_size", 0), **self.common)
        try:
            return dict(loader.iterate_weights())
        finally:
            loader.close()

    def _files(self):
        loader = self.module.SafeTensorsFileLoader(None, **self.common)
        loader.add_filenames({0: list(self.files)})
        buffers = loader.copy_files_to_device()
        self.held = [loader, buffers]
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}

    def release(self):
        for item in reversed(self.held):
            item.close()
        self.held = []


class InstantTensor(Runner):
    """One `safe_open` over all shards; `backend=URING|URING_BUFFERED|AIO|MMAP|BUFFERED`,
    `copy=0|1`. With copy=0 the ring is as large as the model, and the context stays open as long
    as the outputs are in use."""

    package = "instanttensor"

    def prepare(self):
        import warnings

        import instanttensor

        warnings.filterwarnings("ignore", module="instanttensor")
        self.module, self.context = instanttensor, None
        self.copy = self.options.get("copy", "1") not in ("0", "false")
        self.arguments = {"copy": self.copy}
        if backend := self.options.get("backend"):
            self.arguments["backend"] = _instanttensor_backend(instanttensor, backend)
        for key in ("io_depth", "chunk_size", "concurrency", "buffer_size"):
            if key in self.options:
                self.arguments[key] = int(self.options[key])
        if not self.copy and "buffer_size" not in self.arguments:
            self.arguments["buffer_size"] = sum(os.path.getsize(f) for f in self.files)

    def load(self):
        self.context = self.module.safe_open(
            list(self.files), framework="pt", device=self.device, **self.arguments)
        self.context.__enter__()
        out = dict(self.context.tensors())
        if self.copy:
            self.release()
        return out

    def release(self):
        if self.context is not None:
            context, self.context = self.context, None
            context.__exit__(None, None, None)


def _instanttensor_backend(module, name: str):
    for enum in ("Backend", "BackendPolicy"):
        found = getattr(getattr(module, enum, None), name, None)
        if found is not None:
            return found
    from instanttensor import _impl

    return _impl.parse_backend(name)


class RunAi(Runner):
    """`SafetensorsStreamer` over all shards at once."""

    package = "runai-model-streamer"

    def prepare(self):
        import runai_model_streamer

        self.module = runai_model_streamer

    def load(self):
        with self.module.SafetensorsStreamer() as streamer:
            streamer.stream_files(list(self.files), device=self.device)
            return dict(streamer.get_tensors())


# Not loaders: limits and costs, run between the loaders ---------------------------------------


class RawLink(Runner):
    """As many bytes as the model has, from one pinned buffer to the GPU."""

    verifies = False

    def prepare(self):
        from peers.limits import Link

        self.link = Link(self.device)
        self.total = sum(os.path.getsize(f) for f in self.files)

    def load(self):
        self.link.copy(self.total, self.number("streams", 1))
        return {}


class RawDisk(Runner):
    """The model's files by O_DIRECT into a few reused buffers, nothing else done with the bytes."""

    verifies = False

    def load(self):
        from peers.limits import read_files

        read_files([Path(f) for f in self.files], self.number("threads", 8),
                   read_bytes=self.number("kb", 8192) << 10)
        return {}


class RawRead(Runner):
    """The model's files by `pread` into a few reused buffers."""

    verifies = False

    def load(self):
        from peers.limits import read_files

        read_files([Path(f) for f in self.files], self.number("threads", os.cpu_count() or 1),
                   direct=False, read_bytes=self.number("kb", 8192) << 10)
        return {}


class AllocOnly(Runner):
    """The framework's share: makes every output tensor and fills none."""

    verifies = False

    def prepare(self):
        import torch

        from peers import data
        from peers.verify import TORCH_NAMES

        self.torch = torch
        self.wanted = [(e.name, e.shape, getattr(torch, TORCH_NAMES[e.dtype]))
                       for e in data.catalog(self.folder)]

    def load(self):
        empty = self.torch.empty
        return {name: empty(shape, dtype=dtype, device=self.device)
                for name, shape, dtype in self.wanted}


RUNNERS: dict[str, type[Runner]] = {
    "forebay": Forebay,
    "safetensors": Safetensors,
    "safetensors-prefetch": SafetensorsPrefetch,
    "fastsafetensors": FastSafetensors,
    "instanttensor": InstantTensor,
    "runai": RunAi,
    "raw-link": RawLink,
    "raw-disk": RawDisk,
    "raw-read": RawRead,
    "alloc": AllocOnly,
}


def presets(name: str) -> list[str]:
    """Runner lists with every peer at its best settings for that storage; several variants of a
    peer compete in the first round, and the best of them go on."""
    prefetch = [f"safetensors-prefetch:threads={n}" for n in (8, 16, 32)]
    buffered = "env.FASTSAFETENSORS_ODIRECT=0"
    instant = "instanttensor:backend="
    disk = ["raw-disk:threads=4,kb=1024", "raw-disk:threads=8,kb=8192"]
    table = {
        "warm": ["forebay", *prefetch, f"fastsafetensors:{buffered}",
                 f"fastsafetensors:mode=files,{buffered}", instant + "URING_BUFFERED",
                 instant + "MMAP", instant + "MMAP,copy=0", "runai", "safetensors"],
        "tmpfs": ["forebay", *prefetch, f"fastsafetensors:{buffered}",
                  f"fastsafetensors:mode=files,{buffered}", instant + "MMAP",
                  instant + "MMAP,copy=0", "runai", "safetensors"],
        "cold": [*disk, "forebay", "safetensors-prefetch:threads=16", "fastsafetensors",
                 instant + "URING", instant + "URING_BUFFERED", "runai"],
        "host": ["forebay", "safetensors:backend=pread", "safetensors:backend=mmap"],
        "host-cold": [*disk, "forebay", "safetensors:backend=pread",
                      "safetensors:backend=mmap"],
        # The variants that won on an H200 (bench/results/2026-11-30-h200-peers-ext4.json): five
        # visits of each fit a short lease; "warm" tries all.
        "warm-best": ["forebay", *prefetch[:2], instant + "MMAP", instant + "MMAP,copy=0",
                      f"fastsafetensors:mode=files,{buffered}"],
        "best": ["forebay", *prefetch],
    }
    if name not in table:
        raise SystemExit(f"unknown preset {name!r}; known: {', '.join(table)}")
    return table[name]
