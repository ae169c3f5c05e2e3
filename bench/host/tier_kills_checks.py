"""What `tier_kills.py` looks at: the files that tiers have, and what the command finds on them."""

from __future__ import annotations

import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tier_kills import Site

#: Of an upload: what the store sends at once, at least.
PART_BYTES = 8 << 20
#: What bytes may be of those of the data, without kills.
MOST_RATIO = 1.1
#: The attempt in the name of a manifest, as in `forebay.manifest-fc6d5f01-1_0`.
MANIFEST = re.compile(r"forebay\.manifest-([0-9a-f]+-\d+)_\d+")
#: How long one command may take.
COMMAND_SECONDS = 120


def committed(root: Path) -> set[int]:
    """Steps with a commit."""
    return {int(path.parent.name[5:]) for path in root.glob("step-*/.metadata")}


def files(root: Path, step: int) -> dict[str, Path]:
    """What a step is: its files by name, without the records of how it was saved."""
    folder = root / f"step-{step}"
    return {path.name: path for path in folder.iterdir() if path.is_file()}


def strangers(root: Path, step: int) -> list[str]:
    """What is of no attempt but the one whose commit counts, and should not be there."""
    folder, manifests = root / f"step-{step}", set()
    for name in files(root, step):
        if found := MANIFEST.fullmatch(name):
            manifests.add(found[1])
    if len(manifests) != 1:
        return [f"{folder.name} of {root.name} has manifests of {sorted(manifests)}"]
    (attempt,) = manifests
    others = [name for name in files(root, step) if name != ".metadata" and attempt not in name]
    records = folder / ".forebay"
    if records.is_dir():
        # A server may leave folders of what was removed, with nothing in them.
        others += [f".forebay/{path.name}" for path in records.iterdir()
                   if path.name != "readers" and path.is_dir() and path.name != attempt
                   and any(one.is_file() for one in path.rglob("*"))]
    return [f"{folder.name} of {root.name} has {name}" for name in sorted(others)]


def leases(site: Site) -> list[Path]:
    """Leases of readers that were killed: they stay until the step goes, and hold off nobody after a minute."""
    return [path for root in site.roots for path in root.glob("step-*/.forebay/readers/*") if path.is_file()]


def _command(site: Site, *words: str) -> dict:
    done = subprocess.run([site.forebay, *words, "--json"], capture_output=True, text=True, env=site.environ,
                          timeout=COMMAND_SECONDS, check=False)
    if done.returncode != 0:
        return {"error": done.stderr[-600:] or f"exit code {done.returncode}: {done.stdout[-600:]}"}
    told: dict = json.loads(done.stdout)
    return told


def left(site: Site, dead_s: int) -> list[str]:
    """What is left over on any tier and older than that, as the command finds it; uploads; other attempts' files."""
    found = [f"unfinished upload {name}" for name in site.relay.unfinished()]
    for root in site.roots:
        found += [one for step in sorted(committed(root)) for one in strangers(root, step)]
        found += [f"{path.name} of {root.name} has no commit" for path in root.glob("step-*")
                  if any(path.rglob("*.distcp")) and not (path / ".metadata").exists()]
    if found:
        return found
    for place in site.places:
        told = _command(site, "ckpt", "gc", place, "--dry-run", "--grace", str(dead_s))
        found += [f"{place}: {told['error']}"] if "error" in told else []
        found += [f"{place}: {one}" for one in [*told.get("removed", []), *told.get("failed", [])]]
    return found


def unequal(site: Site, step: int) -> list[str]:
    """Where a step is not the same on all tiers."""
    near, found = files(site.roots[0], step), []
    for root in site.roots[1:]:
        there = files(root, step)
        if there.keys() != near.keys():
            found.append(f"step {step} of {root.name} has {sorted(there)}, not {sorted(near)}")
            continue
        found += [f"{name} of step {step} of {root.name} has other bytes" for name, path in near.items()
                  if path.read_bytes() != there[name].read_bytes()]
    return found


def unverified(site: Site, step: int) -> list[str]:
    """A step as it is read from the bucket over the wire, every checksum compared."""
    told = _command(site, "ckpt", "verify", f"{site.places[2]}/step-{step}")
    return [f"step {step} in the bucket: {told['error']}"] if "error" in told else []


def data_bytes(site: Site) -> int:
    """Of all steps in the bucket, once."""
    root = site.roots[2]
    return sum(path.stat().st_size for step in committed(root) for path in files(root, step).values())


def allowed_bytes(site: Site, kills: list[dict]) -> int:
    """Most bytes of uploads. Kills of the trainer cost none."""
    costly = sum(one["who"] != "trainer" for one in kills)
    return int(data_bytes(site) * MOST_RATIO) + costly * PART_BYTES


def all_of(site: Site, kills: list[dict], settled: dict) -> list[str]:
    """What was not as it must be."""
    failed = [f"not {name}" for name in ("trained", "drained") if not settled[name]] + site.ended
    if len(kills) != site.plan.kills:
        failed.append(f"{len(kills)} kills, not {site.plan.kills}")
    wanted = set(range(1, site.plan.steps + 1))
    for root in site.roots:
        if committed(root) != wanted:
            failed.append(f"{root.name} lacks {sorted(wanted - committed(root))}")
    everywhere = sorted(set.intersection(*(committed(root) for root in site.roots)))
    failed += [one for step in everywhere for one in unequal(site, step)]
    with ThreadPoolExecutor(2) as pool:
        failed += [one for some in pool.map(lambda step: unverified(site, step), everywhere) for one in some]
    failed += left(site, settled["dead_s"])
    if (sent := site.relay.counts.bytes) > allowed_bytes(site, kills):
        failed.append(f"{sent} bytes of uploads are more than {allowed_bytes(site, kills)}")
    return failed


def summary(site: Site, kills: list[dict]) -> dict:
    """Figures of a run."""
    counts, data = site.relay.counts, data_bytes(site)
    pending = [one for one in kills if one["committed_near"] > one["committed_bucket"]]
    return {
        "killed": {who: sum(one["who"] == who for one in kills) for who in ("trainer", "agent", "server")},
        "kills_with_steps_under_way": len(pending),
        "starts": site.starts,
        "steps": len(committed(site.roots[2])),
        "data_bytes": data,
        "uploaded_bytes": counts.bytes,
        "uploaded_as_parts": counts.parts,
        "allowed_bytes": allowed_bytes(site, kills),
        "uploaded_of_data": round(counts.bytes / max(data, 1), 4),
        "requests": counts.requests,
        "cut_requests": counts.cut_requests,
        "uploads_the_server_lost": counts.lost_uploads,
        "bytes_the_server_lost": counts.lost_bytes,
        "leases_of_killed_readers": len(leases(site)),
        "bytes_of_those_leases": sum(path.stat().st_size for path in leases(site)),
        "unfinished_uploads": len(site.relay.unfinished()),
    }
