#!/usr/bin/env python3
"""Memory of one large object on its way into a bucket and out of it: at most what the settings say, whatever its size.

    python bench/host/store_memory.py --transfer TRANSFER [--gb 20] [--dir FOLDER] [--out FILE]

TRANSFER is the example of that name of forebay-store, built with `cargo build --release -p forebay-store --example
transfer`. The object is a file with a hole in it, and the server a thread of this process that reads what is sent and
forgets it, and makes up what it sends: so nothing of it lies on a disk, and 20 GB pass where there is room for none. It
speaks of S3 what the client needs, in the client's own words and without any more sense than that; it says nothing of
rates.

Resident memory (VmHWM) is the client's, of the whole process. Bounds, in bytes:

    put   upload_bytes + threads * 8 MiB (buffers of the reader of the file) + 64 MiB (program, connections)
    get   2 * threads * 4 * 8 MiB (buffers of the caller, and one more for ranges that are asked for twice) + 64 MiB

The exit code is 1 if a bound does not hold, or if parts took more than upload_bytes. The peak of the first half of the bytes
is told as well: it may be lower, for an upload fills its room, and a download opens connections and asks twice, whenever the
server is slow for a moment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))
import environment  # noqa: E402

MIB = 1 << 20
PROGRAM = 64 * MIB
RANGES = 4
ZEROS = memoryview(bytes(4 * MIB))
DATE = "Mon, 30 Nov 2026 00:00:00 GMT"


class Server(threading.Thread):
    """Takes every PUT, and has one object of zeros."""

    def __init__(self, size: int) -> None:
        super().__init__(daemon=True)
        self.size, self.taken, self.given = size, 0, 0
        self.small: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        while True:
            stream, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(stream,), daemon=True).start()

    def serve(self, stream: socket.socket) -> None:
        buffer = memoryview(bytearray(MIB))
        left = b""
        # A client that asks twice hangs up on the slower one.
        with stream, contextlib.suppress(ConnectionError):
            while True:
                while b"\r\n\r\n" not in left:
                    more = stream.recv(65536)
                    if not more:
                        return
                    left += more
                head, _, body = left.partition(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                length = int(headers.get("content-length", 0))
                kept, read = bytearray(body[:MIB]), len(body)
                while read < length:
                    count = stream.recv_into(buffer, min(len(buffer), length - read))
                    if not count:
                        return
                    if length <= MIB:
                        kept += buffer[:count]
                    read += count
                left = b""
                method, target, _ = lines[0].split(" ")
                self.answer(stream, method, target, headers, bytes(kept), length)

    def answer(self, stream, method: str, target: str, headers: dict, body: bytes, length: int) -> None:
        path, _, query = target.partition("?")
        more = [f"{name}: {headers[name]}" for name in headers if name.startswith("x-amz-checksum-")]
        if method == "PUT" and length > MIB:
            with self.lock:
                self.taken += length
            return self.send(stream, 200, ['ETag: "part"', *more])
        if method == "PUT":
            self.small[path] = body
            if "partNumber" in query:
                with self.lock:
                    self.taken += length
            return self.send(stream, 200, ['ETag: "small"', *more])
        if method == "POST" and "uploads" in query:
            return self.send(stream, 200, [], b"<InitiateMultipartUploadResult><Bucket>bench</Bucket><Key>k</Key>"
                             b"<UploadId>u</UploadId></InitiateMultipartUploadResult>")
        if method == "POST" and "uploadId" in query:
            return self.send(stream, 200, [], b"<CompleteMultipartUploadResult><ETag>\"whole\"</ETag>"
                             b"</CompleteMultipartUploadResult>")
        if method == "DELETE":
            self.small.pop(path, None)
            return self.send(stream, 204, [])
        if method in ("GET", "HEAD") and path.endswith("/large"):
            return self.give(stream, method, headers)
        if method in ("GET", "HEAD") and path in self.small:
            found = self.small[path]
            head = ['ETag: "small"', f"Last-Modified: {DATE}"]
            return self.send(stream, 200, head, found, bodiless=method == "HEAD")
        return self.send(stream, 404, [])

    def give(self, stream, method: str, headers: dict) -> None:
        head = ['ETag: "large"', f"Last-Modified: {DATE}"]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
        if method == "HEAD" or not asked:
            return self.head(stream, 200, [*head, f"Content-Length: {self.size}"])
        start, end = int(asked[1]), min(int(asked[2]), self.size - 1)
        count = end - start + 1
        self.head(stream, 206, [*head, f"Content-Range: bytes {start}-{end}/{self.size}", f"Content-Length: {count}"])
        with self.lock:
            self.given += count
        while count:
            piece = min(count, len(ZEROS))
            stream.sendall(ZEROS[:piece])
            count -= piece
        return None

    def send(self, stream, status: int, lines: list[str], body: bytes = b"", bodiless: bool = False) -> None:
        self.head(stream, status, [*lines, f"Content-Length: {len(body)}"])
        if body and not bodiless:
            stream.sendall(body)

    @staticmethod
    def head(stream, status: int, lines: list[str]) -> None:
        stream.sendall("\r\n".join([f"HTTP/1.1 {status} x", f"Date: {DATE}", *lines, "", ""]).encode())


def peak(process: int) -> int:
    """Most bytes that were resident so far."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def visit(transfer: Path, what: str, path: str, size: int, threads: int, memory: int) -> dict:
    server = Server(size)
    server.start()
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "benchsecret",
               "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": server.url, "AWS_EC2_METADATA_DISABLED": "true",
               "NO_PROXY": "127.0.0.1"}
    # What is put is not there before.
    key = "large" if what == "get" else "new"
    command = [str(transfer), what, path, "s3://bench/", key, "--threads", str(threads), "--memory", str(memory // MIB)]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    half = 0
    while client.poll() is None:
        if max(server.taken, server.given) < size // 2:
            half = max(half, peak(client.pid))
        time.sleep(0.01)
    output, errors = client.communicate()
    if client.returncode != 0:
        raise SystemExit(f"{what} of {size} bytes: {errors.strip()[-500:]}")
    result = json.loads(output.strip().splitlines()[-1])
    passed = server.taken if what == "put" else server.given
    if result["bytes"] != size or passed < size:
        raise SystemExit(f"{what}: {passed} bytes passed of {size}")
    buffers = threads * 8 * MIB
    bound = (memory + buffers if what == "put" else 2 * RANGES * buffers) + PROGRAM
    within = result["peak_bytes"] <= bound and (what == "get" or result["part_bytes"] <= memory)
    return {"what": what, "bytes": size, "threads": threads, "upload_bytes": memory, "peak_bytes": result["peak_bytes"],
            "peak_bytes_of_half": half, "part_bytes_peak": result["part_bytes"], "bound_bytes": bound, "within": within, "passed_bytes": passed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transfer", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--dir")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    visits = []
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        source = Path(folder) / "source"
        size = int(arguments.gb * 1e9)
        source.touch()
        os.truncate(source, size)
        for threads, memory in ((2, 256 * MIB), (2, 64 * MIB)):
            visits.append(visit(arguments.transfer, "put", str(source), size, threads, memory))
            print(visits[-1], flush=True)
        visits.append(visit(arguments.transfer, "get", "/dev/null", size, 2, 256 * MIB))
        print(visits[-1], flush=True)
    good = all(one["within"] for one in visits)
    print("within the bounds" if good else "NOT within the bounds")
    if arguments.out:
        arguments.out.write_text(json.dumps({
            "command": environment.without_folders([sys.executable, *sys.argv]), "cpu": environment.cpu_model(),
            "cores": environment.cores(), "good": good, "visits": visits}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
