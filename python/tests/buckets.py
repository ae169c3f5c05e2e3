"""A real S3 server for tests: moto, which `cargo xtask test` installs and tells of by `FOREBAY_TEST_MOTO`."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

BUCKET = "forebay-python"
SECRET = "secret-of-the-tests"
#: The server wants to be told who asks, and believes it.
_WHO = "AWS4-HMAC-SHA256 Credential=tester/20260101/us-east-1/s3/x"
#: Names of prefixes, one a test.
_count = itertools.count()


def variables(endpoint: str) -> dict[str, str]:
    """What says how the server is reached."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server with an empty bucket, and its endpoint. Skips the test where there is none."""
    program = os.environ.get("FOREBAY_TEST_MOTO", "")
    if not shutil.which(program):
        assert os.environ.get("FOREBAY_NO_SKIP") != "1", "FOREBAY_TEST_MOTO is missing"
        pytest.skip("FOREBAY_TEST_MOTO names no server; `cargo xtask test` installs it")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open(folder / "moto.log", "wb") as log:
        # It ends when this process does, however that ends.
        command = ["setpriv", "--pdeathsig", "KILL", program, "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
    endpoint = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(
                urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=60
            )
            return server, endpoint
        except OSError:
            assert server.poll() is None, (folder / "moto.log").read_text()
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.05)


def fresh() -> str:
    """A URL below which nobody has anything."""
    return f"s3://{BUCKET}/{os.getpid()}-{next(_count)}"


def put(endpoint: str, url: str, data: bytes) -> None:
    """Puts an object, as any program would."""
    key = url.removeprefix("s3://")
    # Of its own accord urllib says that it is a form.
    headers = {"Content-Type": "application/octet-stream", "Authorization": _WHO}
    request = urllib.request.Request(f"{endpoint}/{key}", data, headers, method="PUT")
    urllib.request.urlopen(request, timeout=60)


def get(endpoint: str, url: str) -> bytes:
    """An object."""
    key = url.removeprefix("s3://")
    request = urllib.request.Request(f"{endpoint}/{key}", headers={"Authorization": _WHO})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: bytes = answer.read()
        return found
