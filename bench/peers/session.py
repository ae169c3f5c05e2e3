"""A worker process as its parent sees it: start, ask with a time limit, stop."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peers.runners import Spec

WORKER = Path(__file__).with_name("worker.py")


class Session:
    def __init__(self, spec: Spec, task: dict, sites: dict[str, str]):
        self.spec, self.dead = spec, None
        read, write = os.pipe()
        self.errors = tempfile.TemporaryFile()
        task = {**task, "kind": spec.kind, "options": spec.options}
        self.closed = False
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), str(write), json.dumps(task)],
            stdin=subprocess.PIPE, stdout=self.errors, stderr=self.errors, pass_fds=[write],
            env=_environment(spec, sites), start_new_session=True)
        os.close(write)
        os.set_blocking(read, False)
        self.read, self.pending, self.ready = read, b"", None

    def wait_ready(self, timeout: float) -> dict:
        if self.ready is None:
            self.ready = self._answer(timeout)
        return self.ready

    def load(self, timeout: float, how: str, sample=None) -> dict:
        if self.dead:
            return {"ok": False, "error": self.dead}
        line = json.dumps({"verify": how}).encode() + b"\n"
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except OSError as err:
            return self._failed(f"the worker is gone: {err}")
        return self._answer(timeout, sample)

    def _answer(self, timeout: float, sample=None) -> dict:
        until = time.monotonic() + timeout
        with selectors.DefaultSelector() as waits:
            waits.register(self.read, selectors.EVENT_READ)
            while b"\n" not in self.pending:
                left = until - time.monotonic()
                if left <= 0:
                    return {**self._failed(f"no answer within {timeout:g} s"),
                            "timed_out": True}
                if waits.select(min(left, 0.002) if sample else left):
                    part = os.read(self.read, 1 << 20)
                    if not part:
                        return self._failed(f"the worker ended with {self.process.wait()}")
                    self.pending += part
                elif sample:
                    sample()
        line, _, self.pending = self.pending.partition(b"\n")
        answer = json.loads(line)
        if not answer["ok"]:
            answer["stderr"] = self._tail()
            self.dead = answer["error"]
        return answer

    def _failed(self, why: str) -> dict:
        self.stop()
        self.dead = why
        return {"ok": False, "error": why, "stderr": self._tail()}

    def _tail(self) -> str:
        if self.errors.closed:
            return ""
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - 3000))
        return self.errors.read().decode(errors="replace")

    def stop(self) -> None:
        """Asks by closing its input, then ends the worker and what it started."""
        if self.closed:
            return
        self.closed = True
        try:
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                pass
        os.close(self.read)


def _environment(spec: Spec, sites: dict[str, str]) -> dict[str, str]:
    env = {**os.environ, **spec.env}
    paths = [sites[spec.site]] if spec.site in sites else []
    paths += [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env
