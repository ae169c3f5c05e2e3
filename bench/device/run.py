#!/usr/bin/env python3
"""The whole battery on a machine with a GPU, Python and torch, and no network.

    bench/device/run.py --wheels .whl --forebay dist --out results --budget-s 540
    bench/device/run.py ... --sections ext4,tmpfs

Installs the carried wheels (peers into one folder, safetensors 0.9.0rc1 into another, Forebay into
a third), makes the models, and runs the sections in order of importance. Each is a run of
bench/peers/load.py with a time limit of its own, so that one hang does not eat the budget, and
leaves its JSON as soon as it is done; `--bundle FILE` keeps all of them in one file as well.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOAD = HERE.parent / "peers" / "load.py"
sys.path.insert(0, str(HERE.parent))

from peers import targets  # noqa: E402

COPY_ONLY = "forebay=forebay copy only:path=copy"
TWO_THREADS = "forebay=forebay 2 threads:threads=2"
THREADS = (1, 2, 4, 8, 12, 16)


@dataclass
class Section:
    """One run of load.py: its model, its place, its arguments and its share of the time."""

    name: str
    tensors: str
    gb: float | None
    place: str
    seconds: float
    arguments: list[str] = field(default_factory=list)


def runs(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--run", text)]


def sections(gb: float, big_gb: float) -> list[Section]:
    curve = [f"forebay=forebay {n} threads:threads={n}" for n in THREADS]
    copying = [f"forebay=forebay copy only {n} threads:path=copy,threads={n}" for n in (4, 16)]
    peers = [f"safetensors-prefetch:threads={n}" for n in (8, 16, 32)]
    return [
        Section("ext4", "llm", gb, "disk", 280, [
            "--preset", "warm-best", "--visits", "5", "--memory-probe",
            *runs(TWO_THREADS, COPY_ONLY, "raw-link")]),
        Section("tmpfs", "llm", gb, "tmpfs", 130, [
            "--preset", "warm-best", "--visits", "5", *runs(COPY_ONLY, "raw-link")]),
        Section("threads", "llm", gb, "disk", 75, [
            "--visits", "3", *runs("forebay", *curve, COPY_ONLY, *copying, "raw-link")]),
        Section("small", "small", None, "disk", 60, [
            "--visits", "3", "--steady", "2",
            *runs("forebay", *peers[:2], "fastsafetensors:env.FASTSAFETENSORS_ODIRECT=0", "alloc",
                  "raw-link")]),
        Section("cold", "llm", gb, "disk", 140, [
            "--cache", "cold", "--preset", "cold", "--phase", "first", "--visits", "3"]),
        Section("big", "llm", big_gb, "disk", 150, [
            "--visits", "3", *runs("forebay", COPY_ONLY, *peers[1:], "raw-link")]),
        Section("variants", "llm", gb, "disk", 150, ["--preset", "warm", "--visits", "1"]),
    ]


class Battery:
    def __init__(self, args):
        self.args, self.started = args, time.monotonic()
        self.out = Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.done: dict[str, dict] = {}
        self.notes: list[str] = []

    def left(self) -> float:
        return self.args.budget_s - (time.monotonic() - self.started)

    def say(self, text: str) -> None:
        line = f"== {time.monotonic() - self.started:6.1f} s  {text}"
        self.notes.append(line)
        print(line, flush=True)

    def command(self, words: list[str], seconds: float, quiet: bool = False) -> int:
        """Runs it in a process group of its own, ended as a whole when its time is up."""
        process = subprocess.Popen([str(w) for w in words], start_new_session=True,
                                   stdout=subprocess.DEVNULL if quiet else None)
        try:
            return process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 15)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(10)
            return -1

    # Packages ------------------------------------------------------------------------------

    def install(self) -> list[str]:
        """Folders for the runners' packages, as `--site` arguments."""
        wheels, root = Path(self.args.wheels), Path(self.args.sites)
        own = [w for g in self.args.forebay for w in _wheels(g)]
        groups = {
            "peers": [w for w in sorted(wheels.glob("*.whl"))
                      if not w.name.startswith(("forebay", "safetensors-"))],
            "safetensors090": sorted((wheels / "rc").glob("*.whl")),
            "safetensors": sorted(wheels.glob("safetensors-*.whl")),
            "forebay": own[-1:],
        }
        out = []
        for name, files in groups.items():
            target = root / name
            if files and not target.exists():
                code = self.command(
                    [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
                     "--no-compile", "--no-cache-dir", "--upgrade", "--target", target, *files],
                    120, quiet=True)
                if code:
                    self.say(f"pip could not install {name}: {[f.name for f in files]}")
            if target.exists():
                out += ["--site", f"{name}={target}"]
        folders = [g for g in self.args.forebay if Path(g, "forebay").is_dir()]
        if folders and not own:
            out += ["--site", f"forebay={Path(folders[0]).resolve()}"]
        elif not own:
            self.say("no Forebay wheel found: its runs will fail")
        return out

    # Models --------------------------------------------------------------------------------

    def model(self, section: Section) -> Path | None:
        root = Path(self.args.tmpfs if section.place == "tmpfs" else self.args.disk)
        root.mkdir(parents=True, exist_ok=True)
        gb = section.gb or 1.4
        folder = root / f"{section.tensors}-{gb:g}"
        if not (folder / "bench.json").exists():
            self._make_room(root, gb, section.place)
            gb = self._fit(root, gb)
        words = [sys.executable, LOAD, "--make", folder, "--tensors", section.tensors,
                 "--shards", str(self.args.shards)]
        if section.gb:
            words += ["--gb", f"{gb:g}"]
        if section.place == "tmpfs":
            words += ["--no-sync"]
        code = self.command(words, min(self.left(), 240))
        if code:
            self.say(f"{section.name}: its model was not made ({code})")
            shutil.rmtree(folder, ignore_errors=True)
        return None if code else folder

    def _make_room(self, root: Path, gb: float, place: str) -> None:
        """Other models go when the disk is too small for both; a tmpfs is made larger if it may."""
        need = gb * 1e9 + (2 << 30)
        if _free(root) >= need:
            return
        if place == "tmpfs":
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(need)}", "tmpfs", str(root)],
                           check=False, capture_output=True)
            return
        for other in sorted(root.iterdir()):
            if (other / "bench.json").exists() and _free(root) < need:
                self.say(f"removing {other.name} to make room")
                shutil.rmtree(other, ignore_errors=True)

    def _fit(self, root: Path, gb: float) -> float:
        room = (_free(root) - (2 << 30)) / 1e9
        if room < gb:
            self.say(f"only {room:.1f} GB fit in place of {gb:g}")
            return max(1.0, float(int(room)))
        return gb

    # Sections ------------------------------------------------------------------------------

    def run(self) -> int:
        sites = self.install()
        wanted = self.args.sections.split(",") if self.args.sections else None
        known = sections(self.args.gb, self.args.big_gb)
        if wanted and (odd := set(wanted) - {s.name for s in known}):
            raise SystemExit(f"unknown sections {sorted(odd)}")
        for section in known:
            if wanted and section.name not in wanted:
                continue
            if self.left() < 30:
                self.say(f"{section.name}: no time left")
                continue
            self._section(section, sites)
        found = {name: targets.Section(doc) for name, doc in self.done.items()}
        self.say("what it must show")
        print(targets.render(found), flush=True)
        return 0 if self.done else 1

    def _section(self, section: Section, sites: list[str]) -> None:
        self.say(f"{section.name}: model")
        folder = self.model(section)
        if folder is None:
            return
        budget = min(section.seconds * self.args.scale, self.left() - 15)
        if budget < 15:
            self.say(f"{section.name}: no time left after making the model")
            return
        out = self.out / f"{section.name}.json"
        words = [sys.executable, LOAD, folder, "--title", section.name, "--out", out,
                 "--budget-s", f"{budget:.0f}", "--timeout-s", str(self.args.timeout_s),
                 "--slow-visits", "1", "--device", self.args.device, *section.arguments, *sites]
        for option in self.args.forebay_opt:
            words += ["--forebay-opt", option]
        if self.args.visits:
            words += ["--visits", str(self.args.visits)]
        self.say(f"{section.name}: up to {budget:.0f} s")
        code = self.command(words, min(budget + 60, self.left() - 3))
        self.say(f"{section.name}: ended with {code}")
        self._keep(section.name, out)

    def _keep(self, name: str, out: Path) -> None:
        try:
            self.done[name] = json.loads(out.read_text())
        except (OSError, ValueError):
            return
        if self.args.bundle:
            bundle = Path(self.args.bundle)
            bundle.parent.mkdir(parents=True, exist_ok=True)
            part = bundle.with_name(bundle.name + ".part")
            part.write_text(json.dumps({"schema": "forebay-bench-battery/1", "notes": self.notes,
                                        "sections": self.done}) + "\n")
            part.replace(bundle)


def _free(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def _wheels(place: str) -> list[Path]:
    found = glob.glob(place) if place.endswith(".whl") else glob.glob(f"{place}/forebay*.whl")
    return sorted(map(Path, found), key=lambda p: p.stat().st_mtime)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--wheels", default=".whl", help="peers' wheels; safetensors 0.9 under rc/")
    p.add_argument("--forebay", action="append", default=[],
                   help="its wheel, a folder with one, or a folder that holds the package")
    p.add_argument("--sites", default="/tmp/forebay-sites", help="where wheels are installed")
    p.add_argument("--disk", default="/tmp/forebay-bench", help="folder for models on a disk")
    p.add_argument("--tmpfs", default="/dev/shm/forebay-bench", help="folder for models in memory")
    p.add_argument("--out", default="results", help="folder for a JSON file a section")
    p.add_argument("--bundle", help="one JSON file with every section")
    p.add_argument("--sections", help="names, comma-separated: " + ",".join(
        s.name for s in sections(16, 48)))
    p.add_argument("--budget-s", type=float, default=540)
    p.add_argument("--scale", type=float, default=1.0, help="times each section's own time limit")
    p.add_argument("--timeout-s", type=float, default=60, help="for one load and its check")
    p.add_argument("--gb", type=float, default=16)
    p.add_argument("--big-gb", type=float, default=48)
    p.add_argument("--shards", type=int, default=4)
    p.add_argument("--visits", type=int, help="in place of each section's own number")
    p.add_argument("--device", default="cuda:0")
    p.add_argument("--forebay-opt", action="append", default=[], metavar="K=V")
    args = p.parse_args()
    args.forebay = args.forebay or ["dist", args.wheels]
    return Battery(args).run()


if __name__ == "__main__":
    sys.exit(main())
