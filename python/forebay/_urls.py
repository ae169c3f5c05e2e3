"""Places by path or URL.

A path is a `pathlib.Path`. The URL of a bucket (`s3://BUCKET/PREFIX`, `gs://`, `az://`, and `memory:NAME` in this process)
is a `Url`, which has of `Path` what is asked of places here: `pathlib` would take one of its slashes away. `file:` URLs
are paths. How a bucket is reached is said by the providers' own variables (`AWS_ENDPOINT_URL`, `AWS_PROFILE`, ...).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from forebay import _native
from forebay._errors import usage

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(?:file|memory):")


class Url(os.PathLike[str]):
    """A place in a bucket. A prefix need not be made, and is there as soon as an object is."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text.rstrip("/")

    def __fspath__(self) -> str:
        return self._text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Url({self._text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self._text}/{name}")

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self._text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """What is before it."""
        return Url(self._text.rpartition("/")[0])

    def absolute(self) -> Url:
        """Itself: a URL depends on no current folder."""
        return self

    def is_dir(self) -> bool:
        """Always: a prefix without objects is an empty folder."""
        return True

    def is_file(self) -> bool:
        """Whether there is an object of that name."""
        return _native.place_has(self.parent, self.name)

    exists = is_file

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing is to be done: buckets have no folders."""


Place = Path | Url


def is_url(path: object) -> bool:
    """Whether this is the URL of a bucket. Errors: `usage` for other URLs."""
    return isinstance(path, str | os.PathLike) and isinstance(place_of(path), Url)


def place_of(path: str | os.PathLike[str]) -> Place:
    """A path, or the URL of a bucket. Errors: `usage` for other URLs, `unsafe_path`."""
    if isinstance(path, Url):
        return path
    text = os.fspath(path)
    if not isinstance(text, str) or not _URL.match(text):
        return Path(path)
    local = _native.local_path(text)
    return Url(text) if local is None else Path(local)


def names_in(place: Place, *below: str) -> list[str]:
    """Names in a folder of a place; none where it is not there."""
    if isinstance(place, Url):
        return _native.place_names(place, "".join(f"{name}/" for name in below))
    try:
        return os.listdir(place.joinpath(*below))
    except OSError:
        return []


def bytes_of(place: Place, *key: str) -> bytes | None:
    """A small file of a place; None where it is not there."""
    if isinstance(place, Url):
        return _native.place_object(place, "/".join(key))
    try:
        return place.joinpath(*key).read_bytes()
    except OSError:
        return None


def home_of(place: Place, what: str) -> Path:
    """The place as a folder. Errors: `usage` for a bucket, of which `what` needs a folder."""
    if isinstance(place, Url):
        raise usage(f"{what} needs a folder, not {str(place)!r}")
    return place
