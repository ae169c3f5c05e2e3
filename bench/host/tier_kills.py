#!/usr/bin/env python3
"""Kills trainer, agent and S3 server at random instants while checkpoints drain, and checks what arrives.

    python bench/host/tier_kills.py --forebay FOREBAY --server S3S_FS [--kills 200] [--seed N] [--out FILE]

A trainer saves steps to a folder, an agent moves them to a second folder and to a bucket of s3s-fs (behind
`s3_relay.py`, which counts what is uploaded). One of the three, drawn by the seed, gets SIGKILL and is started again at
once; then the next, after a random time. Steps are spread over the kills. When the kills are over all is left alone until
it has drained and the times of what is collected are over. Then:

- each step that is committed on the first tier is so on the second and in the bucket, every file equal byte for byte,
  with one `.metadata` and files of no other attempt, and it is what the trainer saved;
- `forebay ckpt gc --dry-run` finds nothing on any tier that is older than dead attempts get to be (15 grace times);
- the server has no unfinished upload;
- bytes of uploads are at most 1.1 times those of the data and one part (8 MiB) a kill.

A trainer is killed no sooner than it begins to work: until then the other two are drawn from. The exit code is 1 where
something was not so. The interpreter needs forebay and torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent / "peers")]
import environment  # noqa: E402
import tier_kills_checks as checks  # noqa: E402
from s3_relay import Relay  # noqa: E402

KEY, SECRET, BUCKET, REGION, PREFIX = "bench", "benchsecret", "bench", "us-east-1", "run7"
VICTIMS = ("trainer", "agent", "server")
#: Grace times after which what shows no sign of life is collected: docs/TIERS.md.
DEAD_GRACES = 15

CONFIG = """\
[[tier]]
name = "near"
place = "near"
[[tier]]
name = "shared"
place = "shared"
write_limit = "{shared_limit}"
[[tier]]
name = "bucket"
place = "s3://{bucket}/{prefix}"
write_limit = "{bucket_limit}"
[tier.store]
endpoint = "{url}"
region = "{region}"
[tiers]
look_every = "200 ms"
part_bytes = "256 KiB"
grace = "{grace} s"
[agent]
socket = "agent.sock"
"""


@dataclass
class Plan:
    """What is done."""

    seed: int
    kills: int = 200
    steps: int = 24
    #: Of a step, about.
    step_bytes: int = 20 << 20
    #: Seconds from one kill to the next, at least and at most.
    pause_s: tuple[float, float] = (0.1, 1.5)
    grace_s: int = 2
    #: So slow that there is always something under way.
    shared_limit: str = "20 MB/s"
    bucket_limit: str = "8 MB/s"
    #: Most seconds from the last kill until all has arrived, and until all is collected after that.
    drain_s: float = 600.0
    collect_s: float = 150.0


@dataclass
class Site:
    """The folder of a run, and what runs in it.

    Trainers are forked from a process that has torch already (`forkserver`): an import takes longer than they live.
    """

    folder: Path
    forebay: str
    server: str
    plan: Plan
    port: int = 0
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    trainer: BaseProcess | None = None
    starts: dict[str, int] = field(default_factory=dict)
    #: Processes that ended by themselves, which none should.
    ended: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("near", f"served/{BUCKET}"):
            (self.folder / name).mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.relay = Relay(self.port, self.folder / "served", BUCKET)
        text = CONFIG.format(shared_limit=self.plan.shared_limit,
                             bucket_limit=self.plan.bucket_limit, bucket=BUCKET, prefix=PREFIX, region=REGION,
                             url=self.relay.url, grace=self.plan.grace_s)
        (self.folder / "forebay.toml").write_text(text)
        self.allow(0)

    @property
    def roots(self) -> list[Path]:
        """Where the files of the tiers lie."""
        return [self.folder / "near", self.folder / "shared", self.folder / "served" / BUCKET / PREFIX]

    @property
    def places(self) -> list[str]:
        """What the command calls them."""
        return [str(self.roots[0]), str(self.roots[1]), f"s3://{BUCKET}/{PREFIX}"]

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION,
                "AWS_ENDPOINT_URL": self.relay.url, "AWS_EC2_METADATA_DISABLED": "true",
                "FOREBAY_CONFIG": str(self.folder / "forebay.toml")}

    def allow(self, step: int) -> None:
        """The trainer may save up to that step."""
        new = self.folder / "allowed.new"
        new.write_text(str(step))
        new.rename(self.folder / "allowed")

    def command(self, who: str) -> list[str]:
        if who == "server":
            return [self.server, "--host", "127.0.0.1", "--port", str(self.port), "--access-key", KEY,
                    "--secret-key", SECRET, str(self.folder / "served")]
        return [self.forebay, "agent", "--config", str(self.folder / "forebay.toml")]

    def start(self, who: str) -> None:
        self.starts[who] = self.starts.get(who, 0) + 1
        if who == "trainer":
            (self.folder / "trainer.ready").unlink(missing_ok=True)
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", "forebay"])
            told = (self.folder, self.plan.steps, self.plan.step_bytes)
            self.trainer = context.Process(target=train, args=told, daemon=True)
            self.trainer.start()
            return
        with (self.folder / f"{who}.log").open("ab") as log:
            # It ends when this process does, however that ends.
            command = ["setpriv", "--pdeathsig", "KILL", *self.command(who)]
            self.running[who] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ)

    def code(self, who: str) -> int | None:
        """How it ended; `None` while it runs."""
        if who == "trainer":
            return self.trainer.exitcode if self.trainer else None
        return self.running[who].poll()

    def kill(self, who: str) -> None:
        if who == "trainer" and self.trainer:
            self.trainer.kill()
            self.trainer.join()
        else:
            self.running[who].kill()
            self.running[who].wait()
        self.note_end(who, self.code(who), (-signal.SIGKILL,))

    def note_end(self, who: str, code: int | None, good: tuple[int, ...]) -> None:
        """A trainer that has saved all may end."""
        if code is not None and code not in good and (who, code) != ("trainer", 0):
            log = self.folder / f"{who}.log"
            tail = log.read_text(errors="replace")[-600:] if log.exists() else ""
            self.ended.append(f"{who} ended with {code}: {tail}")

    def stop(self) -> None:
        if self.trainer:
            self.trainer.kill()
        for process in self.running.values():
            process.kill()
            process.wait()

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Waits; whether it came so."""
        end = time.monotonic() + seconds
        while not holds():
            for who in VICTIMS:
                self.note_end(who, self.code(who), ())
            if self.ended or time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def train(folder: Path, steps: int, step_bytes: int) -> None:
    """The trainer: goes on from the newest step, which must be what was saved, and saves as far as it may."""
    with (folder / "trainer.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    import forebay
    import torch

    def state(step: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(step)
        weights = torch.randint(0, 1 << 30, (step_bytes // 4,), dtype=torch.int32, generator=made)
        return {"weights": weights, "bias": torch.full((1000,), float(step)), "step": step}

    (folder / "trainer.ready").touch()
    with forebay.Checkpointer(folder / "near", agent=folder / "agent.sock") as checkpoints:
        last = checkpoints.latest() or 0
        if last:
            found = {**state(last), "weights": torch.zeros(step_bytes // 4, dtype=torch.int32), "step": 0}
            checkpoints.restore(found)
            if not torch.equal(found["weights"], state(last)["weights"]) or found["step"] != last:
                raise SystemExit(f"step {last} is not what was saved")
        for step in range(last + 1, steps + 1):
            while int((folder / "allowed").read_text()) < step:
                time.sleep(0.05)
            checkpoints.save(step, state(step))
        checkpoints.wait()


def strike(site: Site) -> list[dict]:
    """The kills; for each who it was, when, and what was under way."""
    plan, draw, began = site.plan, random.Random(site.plan.seed), time.monotonic()
    done: list[dict] = []
    while len(done) < plan.kills and not site.ended:
        time.sleep(draw.uniform(*plan.pause_s))
        # A few steps ahead of the kills, so that there is always something to move.
        site.allow(min(plan.steps, 2 + len(done) * plan.steps // plan.kills))
        ready = (site.folder / "trainer.ready").exists()
        who = draw.choice([one for one in VICTIMS if one != "trainer" or ready])
        near, bucket = checks.committed(site.roots[0]), checks.committed(site.roots[2])
        site.kill(who)
        done.append({"who": who, "at_s": round(time.monotonic() - began, 3), "uploaded": site.relay.counts.bytes,
                     "committed_near": len(near), "committed_bucket": len(bucket)})
        site.start(who)
    site.allow(plan.steps)
    return done


def settle(site: Site) -> dict:
    """Waits until all has arrived and what is left over is collected; what did not come so."""
    began, wanted = time.monotonic(), set(range(1, site.plan.steps + 1))
    told: dict = {}
    told["trained"] = site.until(lambda: site.code("trainer") == 0, site.plan.drain_s)
    told["drained"] = told["trained"] and site.until(
        lambda: all(checks.committed(root) == wanted for root in site.roots), site.plan.drain_s)
    told["drained_after_s"] = round(time.monotonic() - began, 1)
    told["dead_s"] = dead = DEAD_GRACES * site.plan.grace_s
    time.sleep(dead + 1)
    told["collected"] = told["drained"] and site.until(lambda: not checks.left(site, dead), site.plan.collect_s)
    told["collected_after_s"] = round(time.monotonic() - began, 1)
    return told


def run(plan: Plan, forebay: str, server: str, above: Path | None = None) -> dict:
    """All of it; `failed` of the result says what was not as it must be."""
    folder = Path(tempfile.mkdtemp(prefix="fbk", dir=above))
    site = Site(folder, forebay, server, plan)
    try:
        for who in ("server", "agent", "trainer"):
            site.start(who)
        began = time.monotonic()
        kills = strike(site)
        took = time.monotonic() - began
        settled = settle(site)
        failed = checks.all_of(site, kills, settled)
        result = {"plan": asdict(plan), "killing_s": round(took, 1), **checks.summary(site, kills), **settled,
                  "failed": failed, "kills": kills}
    finally:
        site.stop()
    if not result["failed"]:
        shutil.rmtree(folder)
    else:
        result["folder"] = str(folder)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forebay")
    parser.add_argument("--server")
    parser.add_argument("--kills", type=int, default=Plan.kills)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--step-bytes", type=int, default=Plan.step_bytes)
    parser.add_argument("--grace-s", type=int, default=Plan.grace_s)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--dir", type=Path, help="where the run's folder is made; its path must be short")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    plan = Plan(seed, arguments.kills, arguments.steps, arguments.step_bytes, grace_s=arguments.grace_s)
    result = run(plan, arguments.forebay, arguments.server, arguments.dir)
    print(json.dumps({name: value for name, value in result.items() if name != "kills"}, indent=1))
    if arguments.out:
        command = environment.without_folders([sys.executable, *sys.argv])
        told = {"command": command, "cpu": environment.cpu_model(), "cores": environment.cores(), **result}
        arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
