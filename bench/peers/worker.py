"""One runner in one process, told by its parent over a pipe what to do and when.

The parent starts it, waits for `ready` (library imported, a tiny tensor on the GPU and nothing
else there), then asks for loads one by one. Answers go to the descriptor named on the command line,
as a line of JSON each; what a library prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from peers import data, runners, touch, verify  # noqa: E402


REPORT_BYTES = 20_000

#: How long CPU is counted after the clock has stopped, for every runner alike: some release registrations, unmap or end
#: threads behind the caller's back. Forebay's release of 9 GB should take 0.1 to 0.2 s, of 16 GB 0.28 (arithmetic).
TAIL_SECONDS = 0.3


def cpu_seconds() -> tuple[float, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


def machine_seconds() -> float:
    """Busy time of the whole machine, to catch work that other processes or kernel threads do."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, soft, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def process_memory() -> dict:
    wanted = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin")
    with open("/proc/self/status") as file:
        lines = (line.split() for line in file)
        return {f[0][:-1]: int(f[1]) * 1024 for f in lines if f[0][:-1] in wanted}


def short(report: dict | None) -> dict | None:
    """A report per extent would swamp the JSON: of a long one only the plain figures stay."""
    if report is None or len(json.dumps(report, default=str)) < REPORT_BYTES:
        return report
    return {k: v for k, v in report.items() if isinstance(v, (int, float, str, type(None)))
            or len(json.dumps(v, default=str)) < 2000}


def end_with_parent() -> None:
    """Linux ends this process when its parent goes, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Worker:
    def __init__(self, task: dict):
        self.task, self.device = task, task["device"]
        self.cuda = self.device.startswith("cuda")
        self.folder = Path(task["folder"])
        self.files = data.shard_files(self.folder)
        self.entries = data.catalog(self.folder)
        self.digests = None
        self.loads = 0

    def prepare(self) -> dict:
        start = time.perf_counter()
        import torch

        self.torch = torch
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
            torch.cuda.synchronize()
        made = time.perf_counter()
        kind = runners.RUNNERS[self.task["kind"]]
        self.runner = kind(self.task["options"], self.device, self.folder, self.files)
        self.runner.prepare()
        return {"torch_seconds": made - start, "import_seconds": time.perf_counter() - made,
                "version": self.runner.version(), "torch": torch.__version__,
                "python": sys.version.split()[0], "pid": os.getpid()}

    def load(self, request: dict) -> dict:
        gc.collect()
        before = self._device_memory(reset=True)
        machine = machine_seconds()
        used = cpu_seconds()
        start = time.perf_counter()
        out = self.runner.load()
        if self.cuda:
            self.torch.cuda.synchronize()
        loaded = time.perf_counter()
        if not self.cuda and self.runner.verifies:
            touch.every_byte(out, self.task["touch_threads"])
        end = time.perf_counter()
        clock_cpu = cpu_seconds()
        time.sleep(TAIL_SECONDS)
        after_cpu = cpu_seconds()
        answer = {
            "seconds": end - start, "load_seconds": loaded - start, "load_index": self.loads,
            "cpu_user": after_cpu[0] - used[0], "cpu_system": after_cpu[1] - used[1],
            "cpu_tail_seconds": sum(after_cpu) - sum(clock_cpu),
            "machine_cpu_seconds": machine_seconds() - machine,
            "bytes": sum(e.nbytes for e in self.entries), "tensors": len(self.entries),
            "memory": {"before": before, "after": self._device_memory(),
                       "process": process_memory()},
        }
        self.loads += 1
        try:
            answer["report"] = short(self.runner.report())
            answer["verified"] = self._verify(out, request["verify"])
        finally:
            del out
            self.runner.release()
            gc.collect()
            if self.cuda and self.task["allocator"] == "empty":
                self.torch.cuda.empty_cache()
        return answer

    def _verify(self, out: dict, how: str) -> dict | None:
        if how == "none" or not self.runner.verifies:
            return None
        root = self.folder if self.folder.is_dir() else self.folder.parent
        if how == "exact":
            return verify.by_bytes(out, self.entries, root, self.device)
        if self.digests is None:
            self.digests = json.loads(Path(self.task["digests"]).read_text())
        return verify.by_digest(out, self.entries, self.digests, self.device)

    def _device_memory(self, reset: bool = False) -> dict | None:
        if not self.cuda:
            return None
        cuda = self.torch.cuda
        stats = {"driver_free": cuda.mem_get_info(self.device)[0],
                 "allocated": cuda.memory_allocated(self.device),
                 "reserved": cuda.memory_reserved(self.device),
                 "peak_allocated": cuda.max_memory_allocated(self.device),
                 "peak_reserved": cuda.max_memory_reserved(self.device)}
        if reset:
            cuda.reset_peak_memory_stats(self.device)
        return stats


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")
    os.dup2(2, 1)
    end_with_parent()

    def say(answer: dict) -> None:
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()

    def guarded(step, *arguments) -> bool:
        try:
            say({"ok": True, **step(*arguments)})
            return True
        except BaseException as err:
            say({"ok": False, "error": f"{type(err).__name__}: {err}"[:2000],
                 "traceback": traceback.format_exc()[-4000:]})
            return False

    worker = Worker(json.loads(sys.argv[2]))
    if guarded(worker.prepare):
        for line in sys.stdin:
            if not guarded(worker.load, json.loads(line)):
                break
    # Some libraries hang or crash in their exit handlers; the answers are out, so skip those.
    os._exit(0)


if __name__ == "__main__":
    main()
