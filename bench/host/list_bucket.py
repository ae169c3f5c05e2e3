#!/usr/bin/env python3
"""`forebay ckpt list` and `latest` on 1,000 committed steps in a bucket of a local S3 server: time and requests.

    python bench/host/list_bucket.py --forebay FOREBAY --server S3S_FS [--steps 1000] [--repeats 5] [--out FILE]

One step is saved to the bucket by `forebay.Checkpointer`; the others are copies of its objects under other numbers, made
in the folder in which the server (s3s-fs) keeps them. Every list is a process of its own, command
start included. `keys` is with the flat prefix of commit keys that saves to buckets leave, `without` the same with those
removed, so that every commit is read. Requests are counted in one more run, through a relay, which is not timed.
The exit code is 1 where the median list with keys takes longer than --limit-s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

KEY, SECRET, BUCKET = "bench", "benchsecret", "bench"


class Counter:
    """A TCP relay that counts requests by their first lines; each runs through it once and is not timed."""

    def __init__(self, port: int) -> None:
        self.port, self.requests = port, {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self.listener.accept()
            server = socket.create_connection(("127.0.0.1", self.port))
            threading.Thread(target=self._relay, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._relay, args=(server, client, False), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if counts:
                    for line in data.split(b"\r\n"):
                        if line.endswith(b" HTTP/1.1"):
                            kind = line.split(b" ")[0].decode()
                            kind = "LIST" if b"list-type" in line else kind
                            self.requests[kind] = self.requests.get(kind, 0) + 1
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for end in (source, sink):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(port: int) -> dict[str, str]:
    return {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


def make(url: str, bucket: Path, steps: int, env: dict[str, str]) -> int:
    """Saves step 1 to the bucket and copies it; returns how many objects there are."""
    script = (
        "import sys, torch, forebay\n"
        "state = {'w': torch.arange(4096.0), 'b': torch.zeros(64), 'step': 1}\n"
        "with forebay.Checkpointer(sys.argv[1]) as checkpoints:\n"
        "    checkpoints.save(1, state, blocking=True)\n"
    )
    subprocess.run([sys.executable, "-c", script, url], env=env, check=True)
    first = bucket / "run" / "step-1"
    commits = bucket / "run" / ".forebay" / "commits"
    _, attempt, epoch, _, *rest = next(commits.iterdir()).name.split("_")
    for step in range(2, steps + 1):
        shutil.copytree(first, bucket / "run" / f"step-{step}")
        (commits / "_".join([str(step), attempt, epoch, str(step - 1), *rest])).touch()
    return sum(1 for path in (bucket / "run").rglob("*") if path.is_file())


def timed(command: list[str], env: dict[str, str], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(command, env=env, check=True, capture_output=True)
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forebay", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=3.0)
    parser.add_argument("--out")
    args = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="forebay-list-"))
    (home / BUCKET).mkdir()
    port = free_port()
    server = subprocess.Popen(
        [args.server, "--host", "127.0.0.1", "--port", str(port), "--access-key", KEY,
         "--secret-key", SECRET, str(home)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1)
        url, env = f"s3://{BUCKET}/run", environment(port)
        result: dict = {"steps": args.steps, "objects": make(url, home / BUCKET, args.steps, env)}
        for state in ("keys", "without"):
            if state == "without":
                shutil.rmtree(home / BUCKET / "run" / ".forebay" / "commits")
            for what in ("list", "latest"):
                command = [args.forebay, "ckpt", what, "--json", url]
                seconds = timed(command, env, args.repeats)
                counter = Counter(port)
                found = subprocess.run(command, env=environment(counter.address), check=True,
                                       capture_output=True)
                told = json.loads(found.stdout)
                assert what != "list" or len(told["steps"]) == args.steps, told
                result[f"{what}_{state}"] = {
                    "median_s": statistics.median(seconds), "seconds": seconds,
                    "requests": counter.requests}
        result["machine"] = {"cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    finally:
        server.kill()
        shutil.rmtree(home, ignore_errors=True)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    return 0 if result["list_keys"]["median_s"] <= args.limit_s else 1


if __name__ == "__main__":
    sys.exit(main())
