"""Servers on loopback for tests and benchmarks of remote reads: S3, and plain HTTP with injected faults."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SECRET = "sUpErSeCrEt-0123456789"


@dataclass
class Faults:
    """Faults and delays of a server, which may be changed while it runs.

    `status` maps the number of a request to an error status or None. `cut` returns True if the response is truncated.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    status: Callable[[int], int | None] = lambda number: None
    cut: Callable[[int], bool] = lambda number: False
    etags: bool = True
    ranges: bool = True
    # Error status of HEAD requests, of requests without the query `signature`, and further headers of all answers.
    head: int | None = None
    signature: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    # Method, path and ``Range`` header of each request.
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    # Value of the header ``x-amz-request-payer`` of each request.
    payers: list[str | None] = field(default_factory=list)
    # Number of bytes in response bodies.
    sent_bytes: int = 0


class Link:
    """Link of limited bandwidth that all connections share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, n_bytes: int, bytes_per_s: float) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + n_bytes / bytes_per_s
            until = self._free_at
        time.sleep(max(0.0, until - now))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes. With Nagle's algorithm, the second would wait for the acknowledgement of the
    # first.
    disable_nagle_algorithm = True
    server: HTTPServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        server, faults = self.server, self.server.faults
        path, wanted = urlsplit(self.path).path, self.headers.get("Range")
        number, status = self.met(path, wanted)
        if path.startswith("/moved/"):
            self.say(302, {"Location": self.path.removeprefix("/moved")}, 0)
            return
        if faults.signature not in (None, urlsplit(self.path).query):
            status = 403
        elif not with_body and faults.head is not None:
            status = faults.head
        file = server.folder / unquote(path).lstrip("/")
        if status is None and not file.is_file():
            status = 404
        if status is not None:
            self.say(status, {}, 0)
            return
        size, changed = file.stat().st_size, file.stat().st_mtime_ns
        headers = {"Last-Modified": formatdate(changed / 1e9, usegmt=True), "Accept-Ranges": "bytes"}
        headers |= faults.headers
        etag = f'"{size}-{changed}"'
        if faults.etags:
            headers["ETag"] = etag
        if self.headers.get("If-Match") not in (None, etag):
            self.say(412, {}, 0)
            return
        start, stop, status = 0, size, 200
        if wanted and faults.ranges:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()  # type: ignore[union-attr]
            start, stop, status = int(first), min(int(last) + 1, size), 206
            if start >= size:
                self.say(416, {"Content-Range": f"bytes */{size}"}, 0)
                return
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.say(status, headers, stop - start)
        if with_body:
            with file.open("rb") as source:
                source.seek(start)
                self.send(source, stop - start, is_cut=faults.cut(number))

    def met(self, path: str, wanted: str | None) -> tuple[int, int | None]:
        """Record a request; return its number, and its error status or None."""
        faults = self.server.faults
        faults.requests.append((self.command, path, wanted))
        faults.payers.append(self.headers.get("x-amz-request-payer"))
        number = next(self.server.numbers)
        if faults.latency_s:
            time.sleep(faults.latency_s)
        return number, faults.status(number)

    def say(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length)}).items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, source: Any, n_bytes: int, *, is_cut: bool) -> None:
        rest = n_bytes // 2 if is_cut else n_bytes
        while rest:
            piece = source.read(min(rest, 2**16))
            rest -= len(piece)
            if self.server.faults.bytes_per_s:
                self.server.link.wait(len(piece), self.server.faults.bytes_per_s)
            self.wfile.write(piece)
            self.server.faults.sent_bytes += len(piece)
        if is_cut:
            self.close_connection = True


class Relay(Handler):
    """Handler that relays requests to an S3 endpoint and returns its responses."""

    def answer(self, *, with_body: bool) -> None:
        self.met(urlsplit(self.path).path, self.headers.get("Range"))
        connection = http.client.HTTPConnection(self.server.endpoint, timeout=60)
        try:
            connection.request(self.command, self.path, headers=dict(self.headers))
            answer = connection.getresponse()
            headers = {name: value for name, value in answer.headers.items() if name.lower() in self.passed}
            length = int(answer.headers.get("Content-Length", 0))
            self.say(answer.status, headers, length)
            if with_body:
                self.send(answer, length, is_cut=False)
        finally:
            connection.close()

    passed = ("etag", "last-modified", "content-range", "content-type", "accept-ranges")


class HTTPServer(ThreadingHTTPServer):
    """Server of a folder over plain HTTP with byte ranges, or relay to an endpoint."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, handler: type[Handler] = Handler, endpoint: str = "") -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.folder = folder
        self.endpoint = endpoint
        self.faults = Faults()
        self.link = Link()
        self.numbers = itertools.count()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up."""


def serving(folder: Path) -> contextlib.AbstractContextManager[HTTPServer]:
    """Serve a folder."""
    return _running(HTTPServer(folder))


def relaying(endpoint: str) -> contextlib.AbstractContextManager[HTTPServer]:
    """Relay requests to an S3 endpoint, given by its URL."""
    return _running(HTTPServer(Path(), Relay, urlsplit(endpoint).netloc))


@contextlib.contextmanager
def _running(server: HTTPServer) -> Iterator[HTTPServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True)
class Bucket:
    """Bucket of an S3 endpoint on loopback."""

    name: str
    options: dict[str, Any]
    client: Any

    def put(self, path: Path, key: str | None = None) -> str:
        """Upload a file or a directory; return its URL."""
        key = key or path.name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                name = key if path.is_file() else f"{key}/{file.relative_to(path).as_posix()}"
                self.client.put_object(Bucket=self.name, Key=name, Body=file.read_bytes())
        return f"s3://{self.name}/{key}"


@contextlib.contextmanager
def s3_endpoint() -> Iterator[Callable[[str], Bucket]]:
    """Start an S3 endpoint on loopback; yield a function that creates a named bucket."""
    import pytest

    pytest.importorskip("flask_cors")
    moto_server = pytest.importorskip("moto.server")
    import logging

    import boto3

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {
            "endpoint": f"http://{host}:{port}",
            "region": "us-east-1",
            "access_key_id": "tester",
            "secret_access_key": SECRET,
        }
        client = boto3.client(
            "s3",
            endpoint_url=options["endpoint"],
            region_name="us-east-1",
            aws_access_key_id="tester",
            aws_secret_access_key=SECRET,
        )

        def bucket_of(name: str) -> Bucket:
            client.create_bucket(Bucket=name)
            return Bucket(name=name, options=dict(options), client=client)

        yield bucket_of
    finally:
        server.stop()


def google_options(bucket: Bucket, prefix: str) -> dict[str, Any]:
    """Make objects below a prefix public; return options for the Google client, which also reads S3."""
    for item in bucket.client.list_objects_v2(Bucket=bucket.name, Prefix=prefix)["Contents"]:
        bucket.client.put_object_acl(Bucket=bucket.name, Key=item["Key"], ACL="public-read")
    account = {
        "gcs_base_url": bucket.options["endpoint"],
        "disable_oauth": True,
        "client_email": "",
        "private_key": SECRET,
        "private_key_id": "",
    }
    return {"service_account_key": json.dumps(account), "client_options": {"allow_http": True}}


def touch_later(path: Path) -> None:
    """Give a file a modification time later than any earlier one."""
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 2 * 10**9))
