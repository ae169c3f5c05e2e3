"""Stock torch, through fsspec and s3fs, reads what Forebay put into a bucket. No part of Forebay is imported.

Arguments: URL of the step, endpoint, rows, columns. Credentials are in the variables. Prints the SHA-256 of the tensor's
bytes, and the object.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader


def main(url: str, endpoint: str, rows: str, columns: str) -> None:
    reader = FsspecReader(
        url, client_kwargs={"endpoint_url": endpoint, "region_name": "us-east-1"}
    )
    state = {"model": {"large": torch.zeros(int(rows), int(columns))}, "object0": None}
    dcp.load(state, storage_reader=reader, no_dist=True)
    digest = hashlib.sha256(memoryview(state["model"]["large"].numpy()).cast("B"))
    print(digest.hexdigest(), state["object0"])


main(*sys.argv[1:])
