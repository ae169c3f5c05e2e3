"""The catalog of a model, as Python lists."""

from __future__ import annotations

import os
from collections.abc import Iterable

from forebay import _native
from forebay._errors import make, plain, quoted, usage
from forebay._urls import place_of

PathLike = str | os.PathLike[str]
#: A folder, an index, a file, or a list of files; each may be the URL of a bucket.
Paths = PathLike | Iterable[PathLike]


class Catalog:
    """An open model and its tensors, in the order of the files' bytes."""

    def __init__(self, paths: Paths) -> None:
        if isinstance(paths, str | os.PathLike):
            self.model = _native.Model.open([place_of(paths)], False)
        elif isinstance(paths, bytes):
            raise usage("the path is bytes, text or a pathlib.Path is needed")
        else:
            try:
                files = [place_of(path) for path in paths]
            except TypeError as error:
                hint = "pass a folder, an index, a file, or a list of files"
                raise usage(f"the path is {paths!r}", hint) from error
            self.model = _native.Model.open(files, True)
        self.entries = self.model.tensors()
        self._places: dict[str, int] | None = None

    @property
    def places(self) -> dict[str, int]:
        """Place in `entries` by name, in the order of `entries`."""
        if self._places is None:
            self._places = {entry.name: place for place, entry in enumerate(self.entries)}
        return self._places

    def find(self, name: str) -> int:
        """The place of a tensor. Errors: `no_such_tensor`."""
        place = self.places.get(name)
        if place is None:
            raise no_such_tensor(name, self.places)
        return place

    def title(self) -> str:
        """What to call the model in messages."""
        files = self.model.files()
        if not files:
            return "model without files"
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        return f"{plain(str(files[0][1]))}{more}"


def no_such_tensor(name: object, known: Iterable[str]) -> Exception:
    """The error for a name that is not there, with names like it as a hint."""
    from difflib import get_close_matches

    hints = []
    # The comparison takes about 10 us a name.
    names = [other for other, _ in zip(known, range(20_000), strict=False)]
    close = get_close_matches(str(name), names, 3)
    if close:
        hints.append("names like it: " + ", ".join(map(quoted, close)))
    else:
        hints.append("keys() of forebay.safe_open, or `forebay inspect`, lists the names")
    return make("no_such_tensor", f"no tensor is called {quoted(name)}", None, hints)
