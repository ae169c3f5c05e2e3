"""A relay before s3s-fs that counts what is uploaded and adds what that server lacks of S3; for servers that are killed.

It reads each request whole and sends it on over a connection of its own; where the server is gone in the middle the
client's connection ends without a reply. Bytes of bodies are counted as they come, also of those that never become
whole. What it adds, so that a client meets what S3 is:

- Changes pass one at a time, and reads not beside them: s3s-fs looks before it writes, S3's preconditions are atomic.
- `GET /BUCKET?uploads`, which s3s-fs does not know, is answered from the server's own folder: an upload is there
  while its `.upload-ID.json` is. Keys and times are noted when uploads are begun.
- `GET /KEY?uploadId=..` is answered from the server's files of parts, with their MD5s as tags, which s3s-fs leaves out.

s3s-fs forgets an upload before it has made the object of it. A kill in between loses all of its parts, which S3's would
not: those uploads are counted (`lost_uploads`, `lost_bytes`), and stay in the bytes.
"""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from xml.sax.saxutils import escape

#: Most bytes of a request's head.
HEAD_BYTES = 1 << 16
#: How long a connection may stand still.
IDLE_SECONDS = 60.0
PIECE = 1 << 16


@dataclass
class Request:
    """What came, without its `Connection` header."""

    method: str
    path: str
    query: dict[str, list[str]]
    head: bytes
    body: bytes


@dataclass
class Counts:
    """Bytes of bodies, by what they were for."""

    parts: int = 0
    objects: int = 0
    requests: int = 0
    cut_requests: int = 0
    lost_uploads: int = 0
    lost_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.parts + self.objects


@dataclass
class Upload:
    """One that was begun."""

    key: str
    began: float = field(default_factory=time.time)


class Relay:
    """Listens at `url` until the process ends; the server may come and go at `port`, with its files in `folder`."""

    def __init__(self, port: int, folder: Path, bucket: str) -> None:
        self.port, self.folder, self.bucket = port, folder, bucket
        self.counts = Counts()
        self.uploads: dict[str, Upload] = {}
        self._counting, self._turn = threading.Lock(), threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def unfinished(self) -> list[str]:
        """Ids of uploads that the server has, neither ended nor aborted."""
        return sorted(path.name[8:-5] for path in self.folder.glob(".upload-*.json"))

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            client.settimeout(IDLE_SECONDS)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                request = self._read(client)
                with self._turn:
                    reply = self._answer(request)
                client.sendall(reply)
            except (OSError, EOFError):
                self._add("cut_requests", 1)

    def _add(self, what: str, count: int) -> None:
        with self._counting:
            setattr(self.counts, what, getattr(self.counts, what) + count)

    def _read(self, client: socket.socket) -> Request:
        """A whole request with a length, its body counted as it comes. Errors: it ends before."""
        data = b""
        while b"\r\n\r\n" not in data:
            more = client.recv(PIECE)
            if not more or len(data) > HEAD_BYTES:
                raise EOFError
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        method, target, _ = lines[0].decode().split(" ")
        path, _, query = target.partition("?")
        found = re.search(rb"(?im)^content-length: *(\d+)", head)
        asked = urllib.parse.parse_qs(query, keep_blank_values=True)
        what = {"PUT": "parts" if "partNumber" in asked else "objects"}.get(method, "")
        body = self._body(client, body, int(found[1]) if found else 0, what)
        self._add("requests", 1)
        whole = b"\r\n".join(lines) + b"\r\nConnection: close\r\n\r\n"
        return Request(method, urllib.parse.unquote(path), asked, whole, body)

    def _body(self, client: socket.socket, begun: bytes, length: int, what: str) -> bytes:
        pieces, have, more = [begun], len(begun), begun
        while True:
            if what:
                self._add(what, len(more))
            if have >= length:
                return b"".join(pieces)
            more = client.recv(min(PIECE, length - have))
            if not more:
                raise EOFError
            pieces.append(more)
            have += len(more)

    def _answer(self, request: Request) -> bytes:
        if request.method == "GET" and "uploads" in request.query:
            return self._list_uploads(request.query)
        if request.method == "GET" and "uploadId" in request.query:
            return self._list_parts(request.query["uploadId"][0])
        if request.method != "POST":
            return self._exchange(request)
        if "uploads" in request.query:
            return self._begin(request)
        if "uploadId" in request.query:
            return self._end(request)
        return self._exchange(request)

    def _exchange(self, request: Request) -> bytes:
        """The server's whole reply. Errors: it is gone, or went meanwhile."""
        with socket.create_connection(("127.0.0.1", self.port), IDLE_SECONDS) as server:
            server.sendall(request.head + request.body)
            reply = bytearray()
            while more := server.recv(PIECE):
                reply += more
        head, _, body = bytes(reply).partition(b"\r\n\r\n")
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        whole = request.method == "HEAD" or length is None or len(body) == int(length[1])
        chunked = re.search(rb"(?im)^transfer-encoding: *chunked", head)
        if not reply or not whole or (chunked and not body.endswith(b"0\r\n\r\n")):
            raise EOFError
        return bytes(reply)

    def _begin(self, request: Request) -> bytes:
        """A new upload: whose it is, the server does not write down. It may be there though its reply is lost."""
        before = set(self.unfinished())
        try:
            return self._exchange(request)
        finally:
            for new in set(self.unfinished()) - before:
                self.uploads[new] = Upload(request.path.removeprefix(f"/{self.bucket}/"))

    def _end(self, request: Request) -> bytes:
        """The end of an upload, which the server may lose."""
        name = request.query["uploadId"][0]
        was, parts = name in self.unfinished(), self._parts(name)
        try:
            return self._exchange(request)
        except (OSError, EOFError):
            key = self.folder / request.path.lstrip("/")
            if was and name not in self.unfinished() and not key.exists():
                self._add("lost_uploads", 1)
                self._add("lost_bytes", sum(path.stat().st_size for path in parts.values() if path.exists()))
            raise

    def _parts(self, name: str) -> dict[int, Path]:
        if not re.fullmatch(r"[0-9a-f-]+", name):
            return {}
        found = self.folder.glob(f".upload_id-{name}.part-*")
        return dict(sorted((int(path.name.rpartition("-")[2]), path) for path in found))

    def _list_uploads(self, query: dict[str, list[str]]) -> bytes:
        """All in one answer: there are few."""
        prefix, lines = query.get("prefix", [""])[0], []
        for name in self.unfinished():
            upload = self.uploads.get(name)
            if upload and upload.key.startswith(prefix):
                lines.append(f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{name}</UploadId>"
                             f"<Initiated>{_time(upload.began)}</Initiated></Upload>")
        return _xml("ListMultipartUploadsResult", "".join(lines))

    def _list_parts(self, name: str) -> bytes:
        if name not in self.unfinished():
            return _xml("Error", "<Code>NoSuchUpload</Code><Message>no such upload</Message>",
                        "404 Not Found")
        lines = []
        for number, path in self._parts(name).items():
            data = path.read_bytes()
            tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
            lines.append(f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{tag}&quot;</ETag>"
                         f"<Size>{len(data)}</Size></Part>")
        return _xml("ListPartsResult", "".join(lines))


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03}Z"


def _xml(root: str, inside: str, status: str = "200 OK") -> bytes:
    more = "" if root == "Error" else "<IsTruncated>false</IsTruncated>"
    body = f'<?xml version="1.0" encoding="UTF-8"?><{root}>{more}{inside}</{root}>'.encode()
    head = (f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nDate: {formatdate(usegmt=True)}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
    return head.encode() + body
