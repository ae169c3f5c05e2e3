"""Checksums that the caller expects."""

from __future__ import annotations

import re
from collections.abc import Mapping

from forebay._catalog import Catalog
from forebay._errors import make, quoted, usage

#: Digests in hex by file number.
Expected = dict[int, str]

_HEX = re.compile(r"[0-9a-fA-F]{64}")


def parse_expected(catalog: Catalog, expected: str | Mapping[str, str] | None) -> Expected:
    """Which file must have which SHA-256. Errors: `usage`."""
    if expected is None:
        return {}
    files = catalog.model.files()
    if isinstance(expected, str):
        if len(files) != 1:
            hint = "pass a dict {file name: SHA-256}"
            raise usage(f"one SHA-256 was given for a model of {len(files)} files", hint)
        return {0: _checked(expected, files[0][0])}
    numbers = {name: number for number, (name, _, _) in enumerate(files)}
    found: Expected = {}
    for name, digest in expected.items():
        if name not in numbers:
            some = ", ".join(map(quoted, list(numbers)[:5]))
            raise usage(
                f"a SHA-256 was given for {quoted(name)}, no file of the model", f"files: {some}"
            )
        found[numbers[name]] = _checked(digest, name)
    return found


def _checked(digest: object, name: str) -> str:
    if not isinstance(digest, str) or not _HEX.fullmatch(digest):
        raise usage(f"{digest!r} is no SHA-256 in hex (64 digits)", where=name)
    return digest.lower()


def compare(catalog: Catalog, expected: Expected, found: Mapping[int, str]) -> None:
    """Errors: `checksum`, naming every file that differs."""
    files = catalog.model.files()
    wrong = [number for number, digest in expected.items() if found.get(number) != digest]
    if not wrong:
        return
    lines = [f"SHA-256 is {found.get(number)}, expected {expected[number]}" for number in wrong[:1]]
    if len(wrong) > 1:
        others = ", ".join(quoted(files[number][0]) for number in wrong[1:20])
        lines.append(f"{len(wrong) - 1} more files differ: {others}")
    where = str(files[wrong[0]][1])
    hint = "the file is damaged or another version: download it again; nothing was handed out"
    raise make("checksum", "; ".join(lines), where, [hint])
