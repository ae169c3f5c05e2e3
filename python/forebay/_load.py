"""`load_file`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from forebay import _native
from forebay._catalog import Catalog, Paths
from forebay._checksums import Expected, compare, parse_expected
from forebay._errors import usage
from forebay._frameworks import FLOATING, Tensor
from forebay._into import Destinations, IntoJob, destinations_of
from forebay._options import Options, engine
from forebay._options import parse as parse_options
from forebay._places import Place
from forebay._places import parse as parse_place
from forebay._report import Report, merged, remember, unverified
from forebay._select import Names, ShardChoice, Slices, places_of, regions_of
from forebay._transfer import Layout, Want, fill_new, start, stream

#: Memory that tensors go through on their way to another dtype; a larger tensor goes alone.
CAST_WINDOW_BYTES = 256 << 20

Progress = Callable[[int, int], object]


def load_file(
    path: Paths,
    device: object = "cpu",
    *,
    names: Names | None = None,
    regions: Mapping[str, Slices] | None = None,
    shard: ShardChoice | None = None,
    dtype: object = None,
    into: object = None,
    strict: bool = True,
    expect_sha256: str | Mapping[str, str] | None = None,
    raw: bool = False,
    threads: int | None = None,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Loads tensors; returns them by name, in the order of the files' bytes.

    Args:
        path: a folder (its index decides, if it has one), an index, a file, or a list of files. Each may be the URL of a
            bucket: `s3://BUCKET/PREFIX`, `gs://`, `az://`.
        device: "cpu" (torch, or numpy where torch is not installed), "cuda", "cuda:N", a number, a torch.device, or
            "host" (numpy arrays, torch is not imported).
        names: which tensors: a name or glob or several, or a function of the name. A name that is not there is an error.
        regions: for tensors by name, a slice or a tuple of slices (step 1): only that part is read. They are loaded beside
            those that `names` chooses, and count before `shard`.
        shard: (dim, rank, world) for every tensor that has the dimension, cut as torch.chunk does; or a function of
            name and shape that returns such a triple, slices, or None for the whole tensor.
        dtype: cast floating-point tensors to this dtype while loading, through at most 256 MiB of extra memory (or one
            tensor). "target" casts to the dtypes of `into`.
        into: a dict of existing tensors to fill, or a torch module, which may be on the meta device: its parameters and
            buffers are made on `device`, and tied ones stay tied. Existing memory is filled where it is. A destination
            of another dtype is an error unless `dtype="target"`. After an error, destinations hold garbage.
        strict: with `into`, names that are missing on either side are an error.
        expect_sha256: SHA-256 in hex: of the file, or a dict by file name. Files are checked while they are loaded (before
            that with `into`); if one differs, nothing is handed out.
        raw: dtypes that the framework lacks become unsigned integers of the same bits instead of an error.
        threads: worker threads; by default what the machine, affinity mask and cgroup allow, at most 16; 32 for buckets.
        options: "path" (auto, dma, copy, direct, buffered, fallback), "cache" (auto, keep, bypass), "arena_bytes",
            "dma_window_bytes", "threads", and tuning for benchmarks.
        progress: called with (bytes done, bytes in all) about ten times a second, and once at the end.

    Raises:
        forebay.Error: with a stable `code`. Ctrl-C raises KeyboardInterrupt within a second.
    """
    began = perf_counter()
    settings = parse_options(options, threads)
    place = parse_place(device)
    catalog = Catalog(path)
    opened = perf_counter()
    places = places_of(catalog, names)
    if places is not None and regions:
        # Beside what the names choose: a region that was asked for is never left out.
        places = sorted({*places, *(catalog.find(name) for name in regions)})
    cut = regions_of(
        catalog, range(len(catalog.entries)) if places is None else places, regions, shard
    )
    expected = parse_expected(catalog, expect_sha256)
    load = _Load(catalog, place, settings, raw, progress, expected)
    if into is None:
        tensors = load.new(places, cut, dtype)
    else:
        destinations = destinations_of(into)
        tensors = load.into(places, cut, dtype, destinations, strict)
    report = load.report()
    report["open_seconds"] = opened - began
    report["total_seconds"] = perf_counter() - began
    remember(report)
    return tensors


@dataclass
class _Load:
    """One call of `load_file`."""

    catalog: Catalog
    place: Place
    options: Options
    raw: bool
    progress: Progress | None
    expected: Expected

    def __post_init__(self) -> None:
        self.parts: list[Report] = []
        self.allocation_seconds = 0.0
        self.cast_tensors = 0
        self.tensors = 0
        # Of all sessions of the load; 0 where there is but one, which knows.
        self.total_bytes = 0
        self.done_before = 0
        self.digests: _native.Digests | None = None
        if self.expected and self.options.cache == "auto":
            # Both read the file: through the page cache the disk is read once.
            engine_options, threads = self.options.engine, self.options.threads
            self.options = Options(threads, self.options.path, "keep", engine_options)

    def new(
        self, places: list[int] | None, cut: dict[int, Any], dtype: object
    ) -> dict[str, Tensor]:
        """Loads into new tensors."""
        if dtype == "target":
            raise usage("dtype 'target' needs destinations", "pass into=, or name a dtype")
        entries = self.catalog.entries
        if dtype is not None:
            chosen = range(len(entries)) if places is None else places
            wanted = self.place.framework.parse_dtype(dtype)
            return self._cast([(place, cut.get(place)) for place in chosen], wanted)
        wants: list[Want] | None = None
        if places is not None or cut:
            chosen = range(len(entries)) if places is None else places
            wants = [(place, cut.get(place)) for place in chosen]
        self._start_digests()
        tensors = self._plain(wants)
        self._finish_digests()
        chosen = range(len(entries)) if places is None else places
        return {entries[place].name: tensor for place, tensor in zip(chosen, tensors, strict=True)}

    def _plain(self, wants: list[Want] | None, place: Place | None = None) -> list[Tensor]:
        """One session into new tensors of the dtypes of the file."""
        place = place or self.place
        layout = Layout(self.catalog, place.framework, wants, self.raw)
        self._count(layout)
        session = start(self.catalog, engine(place.engine, self.options), wants, self.options)
        try:
            tensors, seconds = fill_new(session, place.framework, layout)
            self.allocation_seconds += seconds
            self._finish(session)
        except BaseException:
            self._give_up(session)
            raise
        return tensors

    def _cast(self, wants: list[Want], dtype: object) -> dict[str, Tensor]:
        """Loads through a window, casting floating-point tensors."""
        entries = self.catalog.entries
        framework = self.place.framework
        floating = [entries[place].dtype in FLOATING for place, _ in wants]
        plain = [want for want, casts in zip(wants, floating, strict=True) if not casts]
        casting = [want for want, casts in zip(wants, floating, strict=True) if casts]
        keeps = self.raw or framework.name == "numpy"
        found: dict[int, Tensor] = {}
        self.total_bytes = sum(Layout(self.catalog, framework, wants, keeps).bytes)
        self._start_digests()
        if casting:
            # numpy casts BF16 from its bits, so it needs no dtype of its own for it.
            layout = Layout(self.catalog, framework, casting, keeps)

            def take(target: int, tensor: Tensor) -> None:
                place = casting[target][0]
                found[place] = framework.cast(tensor, dtype, entries[place].dtype)

            self._window(self.place, casting, layout, take)
        if plain:
            for (place, _), tensor in zip(plain, self._plain(plain), strict=True):
                found[place] = tensor
        self._finish_digests()
        return {entries[place].name: found[place] for place, _ in wants}

    def _window(
        self,
        place: Place,
        wants: list[Want],
        layout: Layout,
        take: Callable[[int, Tensor], None],
    ) -> None:
        """One session through bounded memory; `take` gets each tensor as it arrives."""
        self._count(layout)
        self.cast_tensors += len(layout)
        session = start(
            self.catalog,
            engine(place.engine, self.options),
            wants,
            self.options,
            CAST_WINDOW_BYTES,
        )
        try:
            files = [self.catalog.entries[number].file for number, _ in wants]
            arriving = stream(
                session, place.framework, layout, CAST_WINDOW_BYTES, files, self.catalog.model
            )
            for target, tensor in arriving:
                take(target, tensor)
                del tensor
                if self.progress is not None:
                    self.progress(self.done_before + session.done()[0], self.total_bytes)
            self._finish(session)
        except BaseException:
            self._give_up(session)
            raise

    def into(
        self,
        places: list[int] | None,
        cut: dict[int, Any],
        dtype: object,
        destinations: Destinations,
        strict: bool,
    ) -> dict[str, Tensor]:
        """Fills what is there, and makes what is on the meta device."""
        jobs = destinations.jobs(self.catalog, self.place, places, cut, dtype, strict, self.raw)
        # Existing memory must not be touched before the files are known to be right.
        self._start_digests()
        self._finish_digests()
        self.total_bytes = sum(job.bytes for job in jobs)
        for where in {id(job.place): job.place for job in jobs}.values():
            here = [job for job in jobs if job.place is where]
            self._fill([job for job in here if job.address is not None], where)
            self._make([job for job in here if job.address is None and job.cast is None], where)
            self._convert(
                [job for job in here if job.address is None and job.cast is not None], where
            )
        return destinations.finish(jobs)

    def _fill(self, jobs: list[IntoJob], place: Place) -> None:
        """Straight into existing memory."""
        if not jobs:
            return
        self.tensors += len(jobs)
        wants: list[Want] = [(job.index, job.region) for job in jobs]
        session = start(self.catalog, engine(place.engine, self.options), wants, self.options)
        try:
            owners = [job.target for job in jobs]
            addresses = [job.address or 0 for job in jobs]
            session.provide(addresses, owners, place.framework.stream())
            self._finish(session)
        except BaseException:
            self._give_up(session)
            raise
        for job in jobs:
            job.result = job.target

    def _make(self, jobs: list[IntoJob], place: Place) -> None:
        """New tensors, as they are in the file."""
        if jobs:
            made = self._plain([(job.index, job.region) for job in jobs], place)
            for job, tensor in zip(jobs, made, strict=True):
                job.result = tensor

    def _convert(self, jobs: list[IntoJob], place: Place) -> None:
        """Through a window: other dtypes, other layouts."""
        if not jobs:
            return
        wants: list[Want] = [(job.index, job.region) for job in jobs]
        layout = Layout(
            self.catalog, place.framework, wants, self.raw or place.framework.name == "numpy"
        )
        entries = self.catalog.entries

        def take(target: int, tensor: Tensor) -> None:
            job = jobs[target]
            made = place.framework.cast(tensor, job.cast, entries[job.index].dtype)
            job.store(made)

        self._window(place, wants, layout, take)

    def _count(self, layout: Layout) -> None:
        self.tensors += len(layout)

    def _finish(self, session: _native.Session) -> None:
        progress = self.progress
        if progress is not None and self.total_bytes:
            told, before, total = progress, self.done_before, self.total_bytes

            def progress(done: int, _: int) -> object:
                return told(before + done, total)

        report = session.finish(progress)
        self.done_before += report["bytes"]
        self.parts.append(report)

    def _give_up(self, session: _native.Session) -> None:
        session.cancel()
        if self.digests is not None:
            self.digests.cancel()

    def _start_digests(self) -> None:
        if self.expected:
            self.digests = _native.Digests(self.catalog.model, list(self.expected))

    def _finish_digests(self) -> None:
        if self.digests is not None:
            compare(self.catalog, self.expected, self.digests.finish())

    def report(self) -> Report:
        """What the load did."""
        model = self.catalog.model
        files = model.files()
        report = merged(self.parts)
        report["device"] = self.place.engine
        report["framework"] = self.place.framework.name
        report["format"] = model.format()
        report["files"] = len(files)
        report["tensors"] = self.tensors
        report["allocation_seconds"] = self.allocation_seconds
        report["cast_tensors"] = self.cast_tensors
        report["cast_window_bytes"] = CAST_WINDOW_BYTES if self.cast_tensors else 0
        report["warnings"] = model.warnings()
        verified = ["headers: every range, size and dtype"]
        if report["files_unchanged"]:
            count = report["files_unchanged"]
            verified.append(f"{count} files had the same size and times after reading as before")
        if self.expected:
            verified.append(f"SHA-256 of {len(self.expected)} files is the one expected")
        compared = report["verified_gpu_bytes"] + report["verified_cpu_bytes"]
        if compared:
            verified.append(f"checksums (CRC-32) of {compared} bytes, as they were read")
        unchecked = len(files) - len(self.expected)
        report["verified"] = verified
        report["not_verified"] = []
        if unchecked and report["format"].startswith("safetensors"):
            line = f"contents of {unchecked} files: safetensors has no checksums, see expect_sha256"
            report["not_verified"].append(line)
        elif unchecked and report["unverified_bytes"]:
            line = unverified(report["format"], report["unverified_bytes"])
            report["not_verified"].append(line)
        return report
