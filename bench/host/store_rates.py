#!/usr/bin/env python3
"""Uploads and downloads of one object: Forebay beside other clients, against a local S3 server.

    python bench/host/store_rates.py --server S3S_FS --transfer TRANSFER [--bytes N] [--repeats 3] [--out FILE]

TRANSFER is the example of that name of forebay-store, built with `cargo build --release -p forebay-store --example
transfer`; S3S_FS the server of that name in release form. The server is pinned to one core and each client to another;
source, destination and the server's folder are in one tmpfs, so that no disk is measured. Clients take turns; each visit
is a process of its own, which imports and connects before the clock starts and ends with an object that was acknowledged
(put) or a file (get). What came back is compared byte for byte after each get, outside of the time.

The limit of the run is what the server itself can do with the best of the other clients. CPU seconds are the client's,
user and system, of all its threads. Each client is tried with several settings, and its best one counts.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))
import environment  # noqa: E402

KEY, SECRET, BUCKET, REGION = "bench", "benchsecret", "bench", "us-east-1"

#: Settings of each client: name, then what its worker takes.
CLIENTS: dict[str, list[dict]] = {
    "forebay": [{"threads": n} for n in (2, 4, 8)],
    "boto3": [{"max_concurrency": c, "part": p << 20} for c in (4, 10) for p in (8, 32)],
    "boto3-crt": [{"part": 8 << 20}],
    "s3torchconnector": [{"part": p << 20} for p in (8, 32)],
}


def worker(client: str, what: str, path: str, url: str, key: str, options: dict) -> dict:
    """One transfer by a Python client, in this process."""
    return {"boto3": boto3_moves, "boto3-crt": boto3_crt_moves,
            "s3torchconnector": connector_moves}[client](what, path, url, key, options)


def boto3_client(url: str):
    import boto3
    from botocore.config import Config
    return boto3.client("s3", endpoint_url=url, region_name=REGION,
                        config=Config(s3={"addressing_style": "path"}, max_pool_connections=64))


def timed(work) -> dict:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def boto3_moves(what: str, path: str, url: str, key: str, options: dict) -> dict:
    from boto3.s3.transfer import TransferConfig
    client = boto3_client(url)
    client.head_bucket(Bucket=BUCKET)
    config = TransferConfig(max_concurrency=options["max_concurrency"],
                            multipart_chunksize=options["part"], preferred_transfer_client="classic")
    if what == "put":
        return timed(lambda: client.upload_file(path, BUCKET, key, Config=config))
    return timed(lambda: client.download_file(BUCKET, key, path, Config=config))


def boto3_crt_moves(what: str, path: str, url: str, key: str, options: dict) -> dict:
    from boto3.s3.transfer import TransferConfig
    client = boto3_client(url)
    client.head_bucket(Bucket=BUCKET)
    config = TransferConfig(multipart_chunksize=options["part"], preferred_transfer_client="crt")
    if what == "put":
        return timed(lambda: client.upload_file(path, BUCKET, key, Config=config))
    return timed(lambda: client.download_file(BUCKET, key, path, Config=config))


def connector_moves(what: str, path: str, url: str, key: str, options: dict) -> dict:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    config = S3ClientConfig(part_size=options["part"], force_path_style=True)
    client = S3Client(region=REGION, endpoint=url, s3client_config=config)
    piece = 8 << 20

    def put() -> None:
        writer = client.put_object(BUCKET, key)
        with open(path, "rb", buffering=0) as file:
            while data := file.read(piece):
                writer.write(data)
        writer.close()

    def get() -> None:
        reader = client.get_object(BUCKET, key)
        buffer = memoryview(bytearray(piece))
        with open(path, "wb", buffering=0) as file:
            while count := reader.readinto(buffer):
                file.write(buffer[:count])

    return timed(put if what == "put" else get)


def peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class Server:
    """s3s-fs over a folder, on a core of its own."""

    def __init__(self, program: Path, folder: Path, core: int) -> None:
        (folder / BUCKET).mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = ["taskset", "-c", str(core), str(program), "--host", "127.0.0.1", "--port", str(port),
                   "--access-key", KEY, "--secret-key", SECRET, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(500):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise SystemExit("the server does not listen")

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def visit(arguments: argparse.Namespace, server: Server, client: str, what: str, path: Path,
          options: dict) -> dict:
    key = f"{client}.bin"
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
               "AWS_REGION": REGION, "AWS_ENDPOINT_URL": server.url, "AWS_EC2_METADATA_DISABLED": "true"}
    pin = ["taskset", "-c", str(arguments.client_core)]
    if client == "forebay":
        more = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [str(arguments.transfer), what, str(path), f"s3://{BUCKET}/", key, *more]
    else:
        command = [sys.executable, __file__, "--worker",
                   json.dumps([client, what, str(path), server.url, key, options])]
    before = server.cpu()
    done = subprocess.run(pin + command, capture_output=True, text=True, env=environ, timeout=600)
    if done.returncode != 0:
        return {"error": done.stderr.strip().splitlines()[-1][:300] if done.stderr.strip() else "failed"}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return {**result, "server_cpu": server.cpu() - before}


def measure(arguments: argparse.Namespace, folder: Path) -> dict:
    source, back = folder / "source", folder / "back"
    with source.open("wb") as file:
        block = bytearray(os.urandom(16 << 20))
        for at in range(0, arguments.bytes, len(block)):
            block[:8] = at.to_bytes(8, "little")
            file.write(block[:min(len(block), arguments.bytes - at)])
    server = Server(arguments.server, folder / "server", arguments.server_core)
    results: dict[str, dict] = {}
    try:
        for repeat in range(arguments.repeats):
            for client, variants in CLIENTS.items():
                if arguments.only and client not in arguments.only:
                    continue
                for options in variants:
                    name = " ".join([client] + [f"{k}={v}" for k, v in options.items()])
                    entry = results.setdefault(name, {"client": client, "put": [], "get": []})
                    entry["put"].append(visit(arguments, server, client, "put", source, options))
                    got = visit(arguments, server, client, "get", back, options)
                    if "error" not in got:
                        got["equal"] = filecmp.cmp(source, back, shallow=False)
                    entry["get"].append(got)
                    back.unlink(missing_ok=True)
                    shutil.rmtree(folder / "server" / BUCKET)
                    (folder / "server" / BUCKET).mkdir()
                    print(name, "put", entry["put"][-1], "get", got, flush=True)
    finally:
        server.process.kill()
    return results


def summary(results: dict[str, dict], size: int) -> dict:
    out: dict[str, dict] = {}
    for what in ("put", "get"):
        best: dict[str, dict] = {}
        for name, entry in results.items():
            good = [one for one in entry[what] if "error" not in one]
            if not good:
                continue
            rates = sorted(size / one["wall"] / 1e9 for one in good)
            line = {"settings": name, "gb_s": statistics.median(rates), "gb_s_all": rates,
                    "cpu_s_per_gb": statistics.median(one["cpu"] for one in good) / size * 1e9,
                    "server_cpu_s_per_gb": statistics.median(one["server_cpu"] for one in good) / size * 1e9}
            if entry["client"] not in best or best[entry["client"]]["gb_s"] < line["gb_s"]:
                best[entry["client"]] = line
        others = [line for client, line in best.items() if client != "forebay"]
        top = max(others, key=lambda line: line["gb_s"], default=None)
        out[what] = {"best": best}
        if top and "forebay" in best:
            ours = best["forebay"]
            out[what]["rate_ratio"] = ours["gb_s"] / top["gb_s"]
            out[what]["cpu_ratio"] = ours["cpu_s_per_gb"] / top["cpu_s_per_gb"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path)
    parser.add_argument("--transfer", type=Path)
    parser.add_argument("--bytes", type=int, default=4_000_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--server-core", type=int, default=1)
    parser.add_argument("--client-core", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        done = worker(*json.loads(arguments.worker))
        print(json.dumps({**done, "peak_bytes": peak()}))
        return
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        results = measure(arguments, Path(folder))
    told = summary(results, arguments.bytes)
    print(json.dumps(told, indent=1))
    if arguments.out:
        command = environment.without_folders([sys.executable, *sys.argv])
        arguments.out.write_text(json.dumps({"command": command, "bytes": arguments.bytes,
                                             "cpu": environment.cpu_model(), "cores": environment.cores(),
                                             "summary": told, "visits": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
