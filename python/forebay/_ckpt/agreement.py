"""What the ranks agree on at the first save of a structure: who writes what, without any rank knowing all of it.

Each rank describes its structure: names, kinds, dtypes, global shapes, and how each tensor is cut over ranks. Meshes
and placements are described once, not once a rank, so that ranks of one pipeline stage describe the same and have the
same hash. Two or three messages a rank follow:

1. Everyone tells the hash of its description, what went wrong here, and one checksum of its values that others should
   have too. Rank 0 adds the run id.
2. Where hashes or checksums differ, the lowest rank of each hash tells its description, and everyone its checksums one
   by one. Otherwise everyone has the same description, and nothing needs to be told.

From the descriptions every rank computes the same: which ranks hold a region, and which of them writes it (`share`).

Values under one name that differ between ranks (a per-rank counter, a generator's state) are found by the checksums:
one rank's value is stored, so there is one warning that names the keys and the ranks.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay._ckpt.description import Description, Version, read
from forebay._ckpt.meshes import Region
from forebay._ckpt.ranks import Ranks, describe, raise_any
from forebay._ckpt.shared import Shared, share
from forebay._ckpt.writers import writers
from forebay._errors import Error, make, quoted

#: Names in a message.
_SHOWN = 8


@dataclass(slots=True)
class Agreed:
    """The outcome."""

    #: Identifies the structure of the whole job; compared when a save is committed.
    hash: str
    #: What rank 0 said.
    first: dict[str, Any]
    #: By name and region, whether this rank writes what others hold too. What is not here has one holder.
    writes: dict[tuple[str, Region | None], bool]
    #: Names whose tie holds on every rank, and whether this rank writes them down.
    ties: dict[str, bool]
    #: Lines worth telling, the same on every rank.
    warnings: list[str]
    #: What all ranks hold together, for the manifest.
    shared: Shared


@dataclass(slots=True)
class Told:
    """What this rank brings to an agreement."""

    description: Description
    #: A checksum of each value that others should have too, by name.
    checksums: dict[str, int]
    #: Bytes of one element of each dtype.
    size_of: Callable[[str], int]
    step: int
    error: Error | None = None
    #: Said by rank 0 only.
    first: dict[str, Any] = field(default_factory=dict)
    #: Both readings of strided layouts that fit here, by name; see `meshes`.
    readings: dict[str, int] = field(default_factory=dict)


def agree(ranks: Ranks, told: Told, reread: Callable[[dict[str, int]], Description]) -> Agreed:
    """One agreement. A collective call.

    `reread` gives this rank's description once the readings of its strided layouts are known.

    Errors: the first that a rank had, on every rank and named after it; `structure_mismatch`.
    """
    own = json.dumps(told.description.message(), separators=(",", ":"))
    digest = hashlib.sha256(own.encode()).hexdigest()
    values = _checksum(told.checksums)
    answers = ranks.exchange(
        {
            "error": None if told.error is None else describe(told.error),
            "hash": digest,
            "values": values,
            "step": told.step,
            "readings": bool(told.readings),
            "first": told.first if ranks.rank == 0 else None,
        }
    )
    raise_any([answer["error"] for answer in answers], ranks.rank, told.error)
    _same_step(answers)
    description = told.description
    if any(answer["readings"] for answer in answers):
        description = _settle(ranks, told, reread)
        own = json.dumps(description.message(), separators=(",", ":"))
        digest = hashlib.sha256(own.encode()).hexdigest()
        hashes = [answer["hash"] for answer in ranks.exchange({"error": None, "hash": digest})]
    else:
        hashes = [answer["hash"] for answer in answers]
    descriptions = {digest: description}
    warnings: list[str] = []
    alike = len(set(hashes)) == 1
    if not alike or len({answer["values"] for answer in answers}) > 1:
        speaks = hashes.index(digest) == ranks.rank
        details = ranks.exchange(
            {
                "error": None,
                "description": description.message() if speaks and not alike else None,
                "checksums": told.checksums,
            }
        )
        for sender, detail in enumerate(details):
            if detail["description"] is not None and hashes[sender] not in descriptions:
                descriptions[hashes[sender]] = read(detail["description"])
        warnings += _differing([detail["checksums"] for detail in details])
    return _settled(ranks.rank, hashes, descriptions, digest, answers[0]["first"], told, warnings)


def _checksum(checksums: dict[str, int]) -> int:
    crc = 0
    for name in sorted(checksums):
        crc = zlib.crc32(f"{name}\0{checksums[name]}\0".encode(), crc)
    return crc


def _same_step(answers: Sequence[dict[str, Any]]) -> None:
    steps = [answer["step"] for answer in answers]
    if len(set(steps)) > 1:
        other = next(rank for rank, step in enumerate(steps) if step != steps[0])
        what = f"rank 0 saves step {steps[0]}, rank {other} step {steps[other]}"
        raise make("structure_mismatch", what, None, ["every rank passes the same step"])


def _settle(
    ranks: Ranks, told: Told, reread: Callable[[dict[str, int]], Description]
) -> Description:
    """Finds for each strided tensor the reading that fits the local shapes of all ranks."""
    answers = ranks.exchange({"error": None, "readings": told.readings})
    fits: dict[str, int] = {}
    for answer in answers:
        for name, mask in answer["readings"].items():
            fits[name] = fits.get(name, 3) & int(mask)
    for name, mask in sorted(fits.items()):
        if not mask:
            what = f"the local shapes of {quoted(name)} fit no reading of its strided placements"
            raise make("structure_mismatch", what, None, ["save it with plain Shard placements"])
    return reread({name: 0 if mask & 1 else 1 for name, mask in fits.items()})


def _differing(checksums: Sequence[dict[str, int]]) -> list[str]:
    """A line about names whose values differ between ranks."""
    found: dict[str, list[int]] = {}
    reference: dict[str, tuple[int, int]] = {}
    for rank, one in enumerate(checksums):
        for name, crc in one.items():
            first, value = reference.setdefault(name, (rank, crc))
            if value != crc:
                found.setdefault(name, [first]).append(rank)
    if not found:
        return []
    shown = []
    for name in sorted(found)[:_SHOWN]:
        members = sorted(found[name])
        listed = ", ".join(map(str, members[:_SHOWN]))
        shown.append(f"{quoted(name)} (ranks {listed}{', ...' if len(members) > _SHOWN else ''})")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    line = (
        f"values under one key differ between ranks, one of them is stored: "
        f"{', '.join(shown)}{more}; pass what belongs to each rank as per_rank="
    )
    return [line]


def _settled(
    rank: int,
    hashes: Sequence[str],
    descriptions: dict[str, Description],
    own: str,
    first: dict[str, Any],
    told: Told,
    warnings: list[str],
) -> Agreed:
    members: dict[str, list[int]] = {}
    for sender, digest in enumerate(hashes):
        members.setdefault(digest, []).append(sender)
    groups = [(descriptions[digest], tuple(ranks)) for digest, ranks in members.items()]
    names: dict[str, list[Version]] = {}
    for description, ranks in groups:
        for name in sorted(description.entries):
            names.setdefault(name, []).append((description, ranks, description.entries[name]))
    ties: dict[str, bool] = {}
    for name, versions in names.items():
        tied = {entry.tied for _, _, entry in versions}
        if None not in tied and len(tied) == 1:
            ties[name] = rank == min(ranks[0] for _, ranks, _ in versions)
    writes = writers(rank, names, ties, told.size_of)
    text = json.dumps([len(hashes), hashes], separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Agreed(digest, first, writes, ties, warnings, share(names, ties))
