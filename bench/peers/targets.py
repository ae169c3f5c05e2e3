#!/usr/bin/env python3
"""Holds the JSON of a battery against what the project promises, line by line.

    targets.py RESULT.json ...      sections are known by their title
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DEFAULT, COPY_ONLY, TWO_THREADS = "forebay", "forebay copy only", "forebay 2 threads"


class Section:
    def __init__(self, document: dict):
        self.rows = document["summary"]["rows"]
        self.memory = {r["label"]: r for r in document["summary"]["memory"]}
        self.bytes = document["model"]["bytes"]

    def row(self, label: str, phase: str) -> dict | None:
        return next((r for r in self.rows if r["label"] == label and r["phase"] == phase
                     and r["gb_per_s"]), None)

    def rate(self, label: str, phase: str) -> float | None:
        row = self.row(label, phase)
        return row["gb_per_s"]["median"] if row else None

    def field(self, label: str, phase: str, key: str) -> float | None:
        row = self.row(label, phase)
        return row.get(key) if row else None

    def best_peer(self, phase: str) -> float | None:
        rates = [r["gb_per_s"]["median"] for r in self.rows
                 if r["peer"] and r["phase"] == phase and r["gb_per_s"] and not r["differing"]]
        return max(rates, default=None)


def ratio(a, b):
    return a / b if a is not None and b else None


def checks(sections: dict[str, Section]):
    """(what, value, least or None, most or None) for each promise whose section ran."""
    if (s := sections.get("ext4")):
        yield "ext4 warm, steady: of the link", s.field(DEFAULT, "steady", "of_link"), 0.87, None
        yield "ext4 warm, steady: of the best peer", s.field(DEFAULT, "steady",
                                                            "of_best_peer"), 1.12, None
        yield "ext4 warm, first load: of the best peer", s.field(DEFAULT, "first",
                                                                "of_best_peer"), 1.4, None
        yield "CPU a GB, steady: of the best peer", s.field(DEFAULT, "steady",
                                                           "cpu_of_best_peer"), None, 0.6
        yield "2 threads, steady: GB/s", s.rate(TWO_THREADS, "steady"), 35.0, None
        yield "2 threads, steady: CPU of the best peer", s.field(TWO_THREADS, "steady",
                                                                "cpu_of_best_peer"), None, 0.15
        yield "ext4 warm: of our own copy-only path", ratio(
            s.rate(DEFAULT, "steady"), s.rate(COPY_ONLY, "steady")), 1.0, None
        yield from _memory(s)
    if (s := sections.get("tmpfs")):
        own, peer = s.rate(COPY_ONLY, "steady"), s.best_peer("steady")
        needed = min([v for v in (peer and 1.15 * peer, own and 1.25 * own) if v], default=None)
        yield "tmpfs warm, steady: of what is needed", ratio(s.rate(DEFAULT, "steady"),
                                                            needed), 1.0, None
    if (s := sections.get("cold")):
        yield "cold: of the disk", s.field(DEFAULT, "first", "of_disk"), 0.97, None
    whole = sections.get("ext4")
    if (s := sections.get("big")) and whole:
        yield "48 GB: of the 16 GB rate", ratio(s.rate(DEFAULT, "steady"),
                                               whole.rate(DEFAULT, "steady")), 0.9, None
    if (s := sections.get("small")) and whole:
        rate, large = s.rate(DEFAULT, "steady"), whole.rate(DEFAULT, "steady")
        yield "20,000 small tensors: of the large rate", ratio(rate, large), 0.5, None
        alloc = s.row("alloc", "steady")
        if rate and alloc:
            left = s.bytes / rate / 1e9 - alloc["seconds"]["median"]
            yield "  the same without the framework's allocation", ratio(
                s.bytes / left / 1e9 if left > 0 else None, large), None, None
    if (s := sections.get("host-warm")):
        for phase in ("steady", "first"):
            yield f"host warm, {phase}: of safetensors pread", ratio(
                s.rate(DEFAULT, phase), s.rate("safetensors backend=pread", phase)), 1.0, None
    if (s := sections.get("host-cold")):
        yield "host cold: of the disk", s.field(DEFAULT, "first", "of_disk"), 0.95, None


def _memory(section: Section):
    found = section.memory.get(DEFAULT, {})
    mib = 1 << 20

    def size(key):
        return found[key] / mib if isinstance(found.get(key), int) else None

    yield "arena at its peak, MiB", size("arena_peak_bytes"), None, 1024
    yield "registered page cache at its peak, MiB", size("registered_peak_bytes"), None, 16384
    yield "device memory beyond outputs, allocator's peak, MiB", size(
        "allocator_peak_beyond_outputs"), None, 1
    yield "device memory beyond the allocator's, driver, MiB", size(
        "driver_beyond_reserved"), None, 1


def render(sections: dict[str, Section]) -> str:
    lines = []
    for what, value, least, most in checks(sections):
        bound = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else ""
        if value is None:
            verdict = "not measured"
        elif not bound:
            verdict = ""
        else:
            met = value >= least if least is not None else value <= most
            verdict = "met" if met else "MISSED"
        shown = "-" if value is None else f"{value:.3f}"
        lines.append(f"{what:<52} {shown:>10} {bound:>9}  {verdict}")
    return "\n".join(lines)


def read(paths: list[Path]) -> dict[str, Section]:
    out = {}
    for path in paths:
        document = json.loads(path.read_text())
        for item in document.get("sections", {"": document}).values():
            out[item["title"]] = Section(item)
    return out


if __name__ == "__main__":
    print(render(read([Path(a) for a in sys.argv[1:]])))
