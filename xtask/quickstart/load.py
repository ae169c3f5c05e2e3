"""Loads a model with Forebay and with the safetensors library and compares every tensor bit for bit.

Usage: quickstart.py MODEL_FOLDER INSPECT_JSON
The second is what `forebay inspect --digest --json MODEL_FOLDER` printed; its digests are compared too.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import forebay
from safetensors.numpy import load_file


def timed(load):
    start = time.perf_counter()
    tensors = load()
    for tensor in tensors.values():
        # Reads every byte, so that a loader that maps files pays for its reads too.
        tensor.reshape(-1).view("uint8").max(initial=0)
    seconds = time.perf_counter() - start
    return tensors, sum(tensor.nbytes for tensor in tensors.values()), seconds


def compare(ours, theirs, inspected):
    faults = []
    if ours.keys() != theirs.keys():
        faults.append(f"other names: {sorted(ours.keys() ^ theirs.keys())}")
    digests = {tensor["name"]: tensor["sha256"] for tensor in inspected["tensors"]}
    if digests.keys() != theirs.keys():
        faults.append(f"inspect has other names: {sorted(digests.keys() ^ theirs.keys())}")
    for name in sorted(ours.keys() & theirs.keys()):
        mine, reference = ours[name], theirs[name]
        if mine.dtype != reference.dtype or mine.shape != reference.shape:
            faults.append(
                f"{name}: {mine.dtype}{mine.shape}, not {reference.dtype}{reference.shape}"
            )
            continue
        bytes_wanted = reference.tobytes()
        if mine.tobytes() != bytes_wanted:
            faults.append(f"{name}: other bytes")
        if digests.get(name) != hashlib.sha256(bytes_wanted).hexdigest():
            faults.append(f"{name}: inspect gives another digest")
    return faults


def main(folder, report):
    folder = Path(folder)
    ours, total, seconds = timed(lambda: forebay.load_file(folder, device="host"))
    print(
        f"forebay.load_file:      {total / 1e6:8.1f} MB in {seconds * 1e3:7.1f} ms,"
        f" {total / seconds / 1e9:5.2f} GB/s"
    )

    def reference():
        tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(path))
        return tensors

    theirs, total, seconds = timed(reference)
    print(
        f"safetensors.load_file:  {total / 1e6:8.1f} MB in {seconds * 1e3:7.1f} ms,"
        f" {total / seconds / 1e9:5.2f} GB/s"
    )
    faults = compare(ours, theirs, json.loads(Path(report).read_text()))
    for fault in faults:
        print(f"differs: {fault}")
    if faults or not theirs:
        sys.exit(f"error: {len(faults)} differences in {len(theirs)} tensors")
    print(f"{len(theirs)} tensors are equal bit for bit, as loaded and by digest")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
