"""Messages between ranks: JSON in a frame that says its length and checksum.

A length that arrives is a claim: it is checked against a limit before memory is made for it, and the bytes against
their CRC-32 before they are read. A damaged size costs an error, never an allocation.

A head is 24 bytes, little-endian: magic `FBRK`, version (u32), length of the body (u64), CRC-32 of the body (u32),
CRC-32 of the 20 bytes before (u32). A body is JSON, compressed by zlib.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from forebay._errors import make

HEAD_BYTES = 24

#: Bytes of one rank's message, compressed and not. A rank with 100,000 tensors needs about 20 MB before compression.
BODY_MAX_BYTES = 256 << 20
TEXT_MAX_BYTES = 1 << 30

_HEAD = struct.Struct("<4sIQII")
_MAGIC = b"FBRK"
_VERSION = 1


def encode(message: object) -> tuple[bytes, bytes]:
    """Head and body of a message of dicts, lists, text and numbers. Errors: `unsupported` if it is too long."""
    text = json.dumps(message, separators=(",", ":")).encode()
    body = zlib.compress(text, 1)
    if len(body) > BODY_MAX_BYTES or len(text) > TEXT_MAX_BYTES:
        what = f"what this rank has to say takes {len(text)} bytes, {TEXT_MAX_BYTES} is the limit"
        raise make("unsupported", what, None, ["save fewer tensors at a time"])
    fields = (_MAGIC, _VERSION, len(body), zlib.crc32(body))
    checked = zlib.crc32(_HEAD.pack(*fields, 0)[:-4])
    return _HEAD.pack(*fields, checked), body


def body_bytes(head: bytes, sender: str) -> int:
    """The length of the body that belongs to a head. Errors: `checksum`, `unsupported_version`."""
    magic, version, length, _, checked = _HEAD.unpack(head)
    if magic != _MAGIC or zlib.crc32(head[:-4]) != checked or length > BODY_MAX_BYTES:
        raise make("checksum", f"a message of {sender} arrived damaged", None, [_HINT])
    if version != _VERSION:
        what = f"{sender} runs another version of Forebay (messages of version {version})"
        raise make("unsupported", what, None, ["install the same version on all ranks"])
    return int(length)


def decode(head: bytes, body: bytes, sender: str) -> Any:
    """The message. Errors: `checksum`."""
    length = body_bytes(head, sender)
    _, _, _, checked, _ = _HEAD.unpack(head)
    if len(body) < length or zlib.crc32(body[:length]) != checked:
        raise make("checksum", f"a message of {sender} arrived damaged", None, [_HINT])
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(body[:length], TEXT_MAX_BYTES)
    if unpacker.unconsumed_tail:
        raise make("checksum", f"a message of {sender} is longer than it may be", None, [_HINT])
    return json.loads(text)


_HINT = (
    "another program may use the same process group at the same time; look for NCCL or gloo errors"
)
