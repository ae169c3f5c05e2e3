#!/usr/bin/env python3
"""Loads one safetensors model with Forebay and with its peers, in one run, and compares.

    load.py --make DIR --gb 16 --shards 4 --tensors llm     make a model
    load.py DIR --cache warm --preset warm --out FILE       compare on it

Every visit of a runner is a fresh process: its first load is what a user sees, the ones after it
the steady state. Runners take turns, the order rotating from round to round, so that a drift of
the machine meets all alike. The page cache is put in the stated condition and checked before every
load; outputs are compared with the file after the clock stops. README.md in bench/ says the rest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from peers import data, environment, gpu, limits, report, residency, verify  # noqa: E402
from peers.runners import Spec, presets  # noqa: E402
from peers.session import Session  # noqa: E402

READY_SECONDS = 240


class Bench:
    def __init__(self, args, specs: list[Spec]):
        self.args, self.specs, self.sites = args, specs, args.sites
        self.folder = Path(args.model)
        self.files = data.shard_files(self.folder)
        self.entries = data.catalog(self.folder)
        self.cuda = args.device.startswith("cuda")
        self.started = time.monotonic()
        self.runs: list[dict] = []
        self.versions: dict[str, dict] = {}
        self.limits: dict[str, dict | None] = {}
        self.dropped: dict[str, str] = {}
        self.nvml = self._nvml()
        self.truncated = False
        self.environment = environment.gather(self.folder)
        self.failures: dict[str, int] = {}

    def _nvml(self):
        try:
            index = int(self.args.device.partition(":")[2] or 0)
            return gpu.Nvml(index) if self.cuda else None
        except OSError:
            return None

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", file=sys.stderr, flush=True)

    # One run -----------------------------------------------------------------------------

    def run(self) -> dict:
        self.say(f"reference digests of {len(self.entries)} tensors")
        digests = verify.reference(self.folder)
        self.task = {"device": self.args.device, "folder": str(self.folder.resolve()),
                     "allocator": self.args.allocator, "touch_threads": environment.cores(),
                     "digests": str(self._keep_digests(digests))}
        self._measure_limits()
        for visit in range(self.args.visits):
            specs = [s for s in self.specs if self._goes_on(s, visit)]
            turn = visit % max(1, len(specs))
            self._round(visit, specs[turn:] + specs[:turn])
            if visit == 0:
                self._choose()
            if self._out_of_time():
                self.truncated = visit + 1 < self.args.visits
                break
        if self.args.cache == "cold" and not self.args.no_limits:
            residency.drop(self.files)
            self.limits["disk_after"] = limits.disk(self.files, self.args.limit_s)
        return self.save()

    def _keep_digests(self, digests: dict) -> Path:
        """A file for the workers; the model's own folder may not be writable."""
        handle, name = tempfile.mkstemp(prefix="forebay-bench-", suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(digests, file)
        self.temporary = Path(name)
        return self.temporary

    def _out_of_time(self) -> bool:
        return bool(self.args.budget_s) and \
            time.monotonic() - self.started > self.args.budget_s

    def _goes_on(self, spec: Spec, visit: int) -> bool:
        why = self.dropped.get(spec.label)
        return why is None or (why == "slow" and visit < self.args.slow_visits)

    def _round(self, visit: int, specs: list[Spec]) -> None:
        """All runners once. Workers start together, so that importing never runs beside a load."""
        group = max(1, self.args.prestart or (16 if self.cuda else 1))
        for at in range(0, len(specs), group):
            sessions = [Session(s, self.task, self.sites) for s in specs[at : at + group]]
            try:
                for session in sessions:
                    self._note(session.spec, session.wait_ready(READY_SECONDS))
                for session in sessions:
                    if not self._out_of_time() or visit == 0:
                        self._visit(visit, session)
                    session.stop()
                    self.save()
            finally:
                for session in sessions:
                    session.stop()

    def _note(self, spec: Spec, ready: dict) -> None:
        if ready["ok"]:
            keep = ("version", "torch", "python", "torch_seconds", "import_seconds")
            self.versions.setdefault(spec.label, {k: ready[k] for k in keep})
        else:
            self.say(f"{spec.label}: does not start: {ready['error'][:200]}")

    def _visit(self, visit: int, session: Session) -> None:
        phases = ["first"] if self.args.phase != "steady" else ["settle"]
        if self.args.phase != "first":
            phases += ["settle"] * self.args.settle + ["steady"] * self.args.steady
        if self.args.memory_probe and visit == 0:
            phases.append("memory")
        while phases:
            run = self._load(visit, session, phases.pop(0))
            self.runs.append(run)
            if not run["ok"]:
                self._failed(session, run)
                break
            if run["seconds"] > self.args.slow_s and run["phase"] != "steady":
                # Loads that take this long need no settling, and eat the time of the others.
                phases = ["steady"] if "steady" in phases else []
        good = [r for r in self.runs if r["visit"] == visit and r["label"] == session.spec.label
                and r["ok"] and r["phase"] in report.PHASES]
        rates = " ".join(f"{r['phase'][0]}:{r['bytes'] / r['seconds'] / 1e9:.2f}" for r in good)
        self.say(f"visit {visit} {session.spec.label}: {rates or self.runs[-1].get('error')}")

    def _failed(self, session: Session, run: dict) -> None:
        """One more try in another round, unless it cannot start or hung."""
        label = session.spec.label
        self.failures[label] = self.failures.get(label, 0) + 1
        if self.failures[label] > 1 or not session.ready["ok"] or run.get("timed_out"):
            self.dropped[label] = "failed"

    def _load(self, visit: int, session: Session, phase: str) -> dict:
        spec, ready = session.spec, session.ready
        base = {"label": spec.label, "kind": spec.kind, "options": spec.options, "env": spec.env,
                "visit": visit, "phase": phase, "counted": False, "why": None}
        if not ready["ok"]:
            return {**base, **ready, "why": ready["error"]}
        state = residency.enforce(self.files, self.args.cache)
        how = self.args.verify
        if how == "auto":
            # Not after a cold load: reading the file again from the disk would take as long.
            first = not any(r["label"] == spec.label and r["ok"] for r in self.runs)
            how = "exact" if first and self.args.cache == "warm" else "digest"
        watch = gpu.PeakWatch(self.nvml, ready["pid"]) if phase == "memory" else None
        answer = session.load(self.args.timeout_s, how, watch)
        run = {**base, **answer, "cache": state}
        if not answer["ok"]:
            return {**run, "why": answer["error"]}
        run["cpu_seconds"] = run["cpu_user"] + run["cpu_system"]
        if watch:
            run["watch"] = watch.result()
        verified = run.get("verified")
        if state["right"] is False:
            run["why"] = f"page cache not {self.args.cache}: {state['share']:.4f} resident"
        elif verified and not verified["equal"]:
            run["why"] = f"output differs: {verified['first_differences'][:2]}"
        else:
            run["counted"] = phase != "memory"
        return run

    # Limits and choices --------------------------------------------------------------------

    def _measure_limits(self) -> None:
        if self.args.no_limits:
            return
        self.say("limits")
        residency.enforce(self.files, "warm" if self.args.cache == "warm" else "cold")
        if self.args.cache == "cold":
            self._limit("disk", lambda: limits.disk(self.files, self.args.limit_s))
        self._limit("memory", lambda: limits.memory(self.files, environment.cores()))
        if self.cuda:
            self._limit("link", self._link_limit)

    def _limit(self, name: str, measure) -> None:
        try:
            self.limits[name] = measure()
        except Exception as err:
            self.say(f"limit {name}: {type(err).__name__}: {err}")
            self.limits[name] = None

    def _link_limit(self) -> dict:
        """In a process of its own, so that this one never opens a context on the GPU."""
        code = (f"import sys, json; sys.path.insert(0, {sys.path[0]!r}); "
                f"from peers import limits; print(json.dumps(limits.link({self.args.device!r})))")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              timeout=180)
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        return json.loads(done.stdout.splitlines()[-1])

    def _choose(self) -> None:
        """After the first round: of a peer's variants the best first and the best steady go on, and
        a runner far behind is visited less often."""
        def rate(label, phase):
            mine = [r for r in self.runs if r["label"] == label and r["phase"] == phase
                    and report.counts(r)]
            return max((r["bytes"] / r["seconds"] for r in mine), default=0.0)

        best = max((rate(s.label, p) for s in self.specs for p in report.PHASES if not s.is_raw),
                   default=0.0)
        for kind in {s.kind for s in self.specs if s.is_peer}:
            mine = [s.label for s in self.specs if s.kind == kind]
            if len(mine) < 2 or self.args.keep_variants:
                continue
            keep = {max(mine, key=lambda label, p=p: rate(label, p)) for p in report.PHASES}
            for label in set(mine) - keep:
                self.dropped.setdefault(label, "another variant of this peer was faster")
        for spec in self.specs:
            fastest = max(rate(spec.label, p) for p in report.PHASES)
            if spec.is_peer and fastest < self.args.slow_below * best:
                self.dropped.setdefault(spec.label, "slow")

    # Output --------------------------------------------------------------------------------

    def save(self) -> dict:
        summary = report.summarize(self.runs, self.specs, self.limits, self.args.cache)
        document = {
            "schema": "forebay-bench-load/1", "title": self.args.title,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": command_line(), "device": self.args.device, "cache": self.args.cache,
            "model": {"bytes": sum(e.nbytes for e in self.entries),
                      "tensors": len(self.entries), "files": len(self.files),
                      "made": data.facts(self.folder) if self.folder.is_dir() else None},
            "settings": {k: getattr(self.args, k) for k in (
                "visits", "settle", "steady", "phase", "allocator", "verify", "slow_below",
                "slow_visits", "slow_s", "keep_variants", "timeout_s")},
            "environment": self.environment, "versions": self.versions,
            "limits": self.limits, "dropped": self.dropped, "truncated": self.truncated,
            "seconds": time.monotonic() - self.started, "summary": summary, "runs": self.runs,
        }
        if self.args.out:
            out = Path(self.args.out)
            out.parent.mkdir(parents=True, exist_ok=True)
            part = out.with_name(out.name + ".part")
            part.write_text(json.dumps(document, indent=1, default=str) + "\n")
            part.replace(out)
        return document


def command_line() -> str:
    """The command without the folders of this machine."""
    return environment.without_folders(sys.argv)


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model", nargs="?", help="model folder or file to load")
    p.add_argument("--make", metavar="DIR", help="make a model there (kept when it is the same)")
    p.add_argument("--gb", type=float, help="its size in 10^9 bytes")
    p.add_argument("--shards", type=int, default=4)
    p.add_argument("--tensors", choices=("small", "large", "llm"), default="llm")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--no-sync", action="store_true", help="do not fsync what --make wrote")
    p.add_argument("--device", default="cuda:0", help="cuda:N or cpu")
    p.add_argument("--cache", choices=("warm", "cold"), default="warm")
    p.add_argument("--preset", default=None, help="warm, tmpfs, cold, host, host-cold, best")
    p.add_argument("--run", action="append", default=[], metavar="KIND[=LABEL][:k=v,..]")
    p.add_argument("--skip", action="append", default=[], help="leave out runners of this kind")
    p.add_argument("--site", action="append", default=[], metavar="NAME=DIR",
                   help="folder of a runner's packages: forebay, peers, safetensors, "
                        "safetensors090")
    p.add_argument("--forebay-opt", action="append", default=[], metavar="K=V")
    p.add_argument("--visits", type=int, default=5, help="fresh processes for each runner")
    p.add_argument("--settle", type=int, default=1, help="loads after the first, not counted")
    p.add_argument("--steady", type=int, default=1, help="steady loads counted in a visit")
    p.add_argument("--phase", choices=("both", "first", "steady"), default="both")
    p.add_argument("--allocator", choices=("keep", "empty"), default="keep",
                   help="torch's cache between loads of a process, the same for all")
    p.add_argument("--verify", choices=("auto", "exact", "digest", "none"), default="auto",
                   help="auto: every byte at a runner's first load, digests at the others")
    p.add_argument("--keep-variants", action="store_true", help="never drop a peer's variants")
    p.add_argument("--slow-below", type=float, default=0.25, metavar="SHARE",
                   help="a peer below this share of the best rate is visited less often")
    p.add_argument("--slow-visits", type=int, default=2)
    p.add_argument("--slow-s", type=float, default=5.0,
                   help="a load longer than this is followed by one steady load at most")
    p.add_argument("--prestart", type=int, help="workers started together (16 on a GPU, else 1)")
    p.add_argument("--memory-probe", action="store_true", help="one more load, memory watched")
    p.add_argument("--no-limits", action="store_true")
    p.add_argument("--limit-s", type=float, default=3.0, help="seconds a disk depth is read")
    p.add_argument("--timeout-s", type=float, default=120.0, help="for one load and its check")
    p.add_argument("--budget-s", type=float, help="start no further load after this")
    p.add_argument("--title", default="")
    p.add_argument("--out", help="JSON file")
    args = p.parse_args(argv)
    args.sites = {}
    for item in args.site:
        name, _, folder = item.partition("=")
        args.sites[name] = str(Path(folder).resolve())
    return args


def chosen_specs(args) -> list[Spec]:
    preset = args.preset or (None if args.run else
                             "warm" if args.device != "cpu" and args.cache == "warm" else
                             "cold" if args.device != "cpu" else
                             "host" if args.cache == "warm" else "host-cold")
    if preset and preset.startswith("host"):
        args.keep_variants, args.slow_below, args.slow_s = True, 0.0, 1e9
    texts = (presets(preset) if preset else []) + args.run
    specs = [s for s in map(Spec.parse, texts) if s.kind not in args.skip]
    for spec in specs:
        if spec.kind == "forebay":
            extra = dict(o.partition("=")[::2] for o in args.forebay_opt)
            spec.options = {**extra, **spec.options}
    if len({s.label for s in specs}) != len(specs):
        raise SystemExit("two runners have one label; give them labels: KIND=LABEL:...")
    return specs


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.make:
        start = time.perf_counter()
        made = data.make(Path(args.make), args.tensors, args.gb, args.shards, args.seed,
                         sync=not args.no_sync)
        took = time.perf_counter() - start
        print(f"{'kept' if made['reused'] else 'made'} {made['bytes'] / 1e9:.2f} GB, "
              f"{made['tensors']} tensors, {len(made['files'])} files in {took:.1f} s")
        if not args.model:
            return 0
    if not args.model:
        raise SystemExit("give a model folder, or --make DIR")
    bench = Bench(args, chosen_specs(args))
    try:
        document = bench.run()
    finally:
        if getattr(bench, "temporary", None):
            bench.temporary.unlink(missing_ok=True)
    print(report.table(document))
    bad = [r for r in document["summary"]["rows"] if r["kind"] == "forebay" and r["differing"]]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
