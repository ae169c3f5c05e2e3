"""Files that a caller adds to a step's folder."""

from __future__ import annotations

from collections.abc import Mapping

from forebay._errors import quoted, usage

#: With what the native part puts before it, a name has to fit 255 bytes.
_NAME_BYTES = 200

SideFiles = Mapping[str, bytes]


def listed(files: SideFiles | None) -> list[tuple[str, bytes]]:
    """Side files as the native part takes them. Errors: `usage`."""
    if files is not None and not isinstance(files, Mapping):
        raise usage(f"side_files is {type(files).__name__}, a dict is needed")
    found = []
    for name, data in (files or {}).items():
        if not isinstance(name, str) or not isinstance(data, bytes | bytearray | memoryview):
            raise usage(f"side file {name!r} is {type(data).__name__}, a name and bytes are needed")
        plain = name.isprintable() and not set(name) & set("/\\") and name[:1] not in ("", ".")
        if not plain or len(name.encode()) > _NAME_BYTES:
            hint = "one name without folders, that does not start with a dot"
            raise usage(f"a side file cannot be called {quoted(name)}", hint)
        found.append((name, bytes(data)))
    return found
