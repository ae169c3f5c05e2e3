"""Sums up the raw runs: medians, spreads, ratios to limits and to the best peer; prints a table.

Only runs that count go in: the page cache was as stated, the load did not fail, and what was
compared was equal. `first` is the first load of a fresh process, `steady` the later ones after one
to settle.
"""

from __future__ import annotations

from statistics import median

PHASES = ("first", "steady")


def spread(values: list[float]) -> dict | None:
    values = [v for v in values if v is not None]
    if not values:
        return None
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def counts(run: dict) -> bool:
    return bool(run.get("ok") and run.get("counted"))


def summarize(runs: list[dict], specs: list, limits: dict, cache: str) -> dict:
    rows = []
    for spec in specs:
        for phase in PHASES:
            mine = [r for r in runs if r["label"] == spec.label and r["phase"] == phase]
            if mine:
                rows.append(_row(spec, phase, mine))
    out = {"rows": rows, "not_counted": _not_counted(runs), "memory": _memory(runs, specs)}
    for phase in PHASES:
        _ratios([r for r in rows if r["phase"] == phase], limits, cache)
    return out


def _row(spec, phase: str, mine: list[dict]) -> dict:
    good = [r for r in mine if counts(r)]
    verified = [r["verified"] for r in mine if r.get("verified")]
    return {
        "label": spec.label, "kind": spec.kind, "peer": spec.is_peer, "raw": spec.is_raw,
        "phase": phase, "runs": len(mine), "counted": len(good),
        "gb_per_s": spread([r["bytes"] / r["seconds"] / 1e9 for r in good]),
        "seconds": spread([r["seconds"] for r in good]),
        "cpu_ms_per_gb": spread([1e3 * r["cpu_seconds"] / (r["bytes"] / 1e9) for r in good]),
        "machine_cpu_ms_per_gb": spread(
            [1e3 * r["machine_cpu_seconds"] / (r["bytes"] / 1e9) for r in good]),
        "verified": sum(v["equal"] for v in verified), "differing": sum(not v["equal"]
                                                                        for v in verified),
        "errors": sorted({r["error"][:200] for r in mine if r.get("error")}),
    }


def _not_counted(runs: list[dict]) -> list[dict]:
    return [{"label": r["label"], "visit": r["visit"], "phase": r["phase"], "why": r["why"]}
            for r in runs if r.get("why")]


def _ratios(rows: list[dict], limits: dict, cache: str) -> None:
    def rate(row):
        return row["gb_per_s"]["median"] if row["gb_per_s"] else None

    rated = [r for r in rows if rate(r)]
    raw = {kind: max(rate(r) for r in rated if r["kind"] == kind)
           for kind in {r["kind"] for r in rated if r["raw"]}}
    link = max(filter(None, [raw.get("raw-link"), (limits.get("link") or {}).get("gb_per_s")]),
               default=None)
    disks = [raw.get("raw-disk")] if raw.get("raw-disk") else [
        (limits.get(k) or {}).get("gb_per_s") for k in ("disk", "disk_after")]
    disk = max(filter(None, disks), default=None)
    peers = [r for r in rated if r["peer"] and not r["differing"]]
    best = max(peers, key=rate, default=None)
    for row in rated:
        row["of_link"] = rate(row) / link if link else None
        row["of_disk"] = rate(row) / disk if disk and cache == "cold" else None
        if best and not row["raw"]:
            row["of_best_peer"] = rate(row) / rate(best)
            row["best_peer"] = best["label"]
            if row["cpu_ms_per_gb"] and best["cpu_ms_per_gb"]["median"]:
                row["cpu_of_best_peer"] = (row["cpu_ms_per_gb"]["median"]
                                           / best["cpu_ms_per_gb"]["median"])


def _memory(runs: list[dict], specs: list) -> list[dict]:
    """Device memory beyond the outputs (first load: the allocator's cache is empty), and pins."""
    out = []
    for spec in specs:
        mine = [r for r in runs if r["label"] == spec.label and r.get("ok")]
        row = {"label": spec.label}
        for run in mine:
            memory = run["memory"]
            if run["phase"] == "first" and memory["before"]:
                before, after = memory["before"], memory["after"]
                row["driver_beyond_outputs"] = (before["driver_free"] - after["driver_free"]
                                                - run["bytes"])
                row["allocator_beyond_outputs"] = (after["allocated"] - before["allocated"]
                                                   - run["bytes"])
                row["allocator_peak_beyond_outputs"] = (after["peak_allocated"]
                                                        - before["allocated"] - run["bytes"])
                row["driver_beyond_reserved"] = (
                    before["driver_free"] - after["driver_free"]
                    - (after["reserved"] - before["reserved"]))
                row["reserved_beyond_outputs"] = (after["reserved"] - before["reserved"]
                                                  - run["bytes"])
            watch = run.get("watch")
            if watch:
                row["watched"] = watch
            for key, value in _pinned(run.get("report") or {}).items():
                row[key] = max(value, row.get(key, 0))
            row["host_rss_peak"] = max(row.get("host_rss_peak", 0),
                                       memory["process"].get("VmHWM", 0))
        if len(row) > 1:
            out.append(row)
    return out


def _pinned(report: dict) -> dict[str, int]:
    """Forebay's own count of pinned memory; the arena may have a table of its own."""
    arena = report.get("arena") if isinstance(report.get("arena"), dict) else {}
    found = {"arena_peak_bytes": report.get("arena_peak_bytes", arena.get("peak_bytes")),
             "arena_bytes": report.get("arena_bytes", arena.get("size_bytes")),
             "registered_peak_bytes": report.get("registered_peak_bytes")}
    return {key: value for key, value in found.items() if isinstance(value, int)}


# Table ---------------------------------------------------------------------------------------


def _number(value, form="{:.2f}") -> str:
    return "-" if value is None else form.format(value)


def table(document: dict) -> str:
    summary, lines = document["summary"], []
    model = document["model"]
    lines.append(f"{model['bytes'] / 1e9:.2f} GB, {model['tensors']} tensors, "
                 f"{model['files']} files, {document['cache']}, to {document['device']}")
    limits = {k: v["gb_per_s"] for k, v in document["limits"].items() if v}
    for name, value in limits.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v:.1f}" for k, v in value.items())
            lines.append(f"  limit {name}: {value} GB/s")
        else:
            lines.append(f"  limit {name}: {value:.2f} GB/s")
    for phase in PHASES:
        rows = [r for r in summary["rows"] if r["phase"] == phase]
        if rows:
            lines += ["", _head(phase), *map(_line, sorted(rows, key=_order))]
    if summary["memory"]:
        lines += ["", *_memory_lines(summary["memory"])]
    for item in summary["not_counted"][:12]:
        lines.append(f"  not counted: {item['label']} visit {item['visit']} {item['phase']}: "
                     f"{item['why'][:160]}")
    return "\n".join(lines)


def _order(row):
    return -(row["gb_per_s"]["median"] if row["gb_per_s"] else 0)


def _head(phase: str) -> str:
    return (f"{phase:<46} {'GB/s':>7} {'min':>7} {'max':>7} {'n':>3} {'s':>7} {'CPU ms/GB':>9} "
            f"{'/link':>6} {'/disk':>6} {'/peer':>6} {'equal':>6}")


def _line(row: dict) -> str:
    rate, cpu = row["gb_per_s"] or {}, row["cpu_ms_per_gb"] or {}
    equal = "-" if row["raw"] else f"{row['verified']}/{row['verified'] + row['differing']}"
    return (f"{row['label'][:46]:<46} {_number(rate.get('median')):>7} "
            f"{_number(rate.get('min')):>7} {_number(rate.get('max')):>7} "
            f"{rate.get('n', 0):>3} {_number((row['seconds'] or {}).get('median'), '{:.3f}'):>7} "
            f"{_number(cpu.get('median'), '{:.0f}'):>9} "
            f"{_number(row.get('of_link')):>6} {_number(row.get('of_disk')):>6} "
            f"{_number(row.get('of_best_peer')):>6} {equal:>6}"
            + (f"  {row['errors'][0][:60]}" if row["errors"] else ""))


def _memory_lines(rows: list[dict]) -> list[str]:
    def mib(value):
        return "-" if value is None else f"{value / (1 << 20):.0f}"

    out = [f"{'memory, MiB':<46} {'dev beyond':>10} {'dev peak':>9} {'arena':>7} "
           f"{'registered':>10} {'RSS peak':>9}"]
    for row in rows:
        watch = row.get("watched") or {}
        peak = None
        if watch.get("device_used_peak") and watch.get("device_used_before") is not None:
            peak = watch["device_used_peak"] - watch["device_used_before"]
        out.append(f"{row['label'][:46]:<46} {mib(row.get('driver_beyond_outputs')):>10} "
                   f"{mib(peak):>9} {mib(row.get('arena_peak_bytes')):>7} "
                   f"{mib(row.get('registered_peak_bytes')):>10} "
                   f"{mib(row.get('host_rss_peak')):>9}")
    return out
