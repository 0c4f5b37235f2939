"""Run a registry on this machine: one in this process, which can misbehave, or Debian's docker-registry."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = tuple[int, dict[str, str], bytes]


class Registry:
    """Hold the blobs and manifests of one repository in memory.

    Attributes:
        host: the address at which it listens.
        change: a test's change to an answer, by the request's method, path and headers.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.seen: list[tuple[str, str, str]] = []
        self.change: Callable[[str, str, dict[str, str], Answer], Answer] = lambda m, p, h, answer: answer
        self.host = ""

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        place, _, query = path.partition("?")
        digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
        if method == "POST":
            return 202, {"Location": "/v2/models/net/blobs/uploads/1?state=x"}, b""
        if method == "PUT":
            if query and not query.endswith(f"digest={digest}"):
                return 400, {}, b""
            self.blobs[digest] = body
            if "/manifests/" in place:
                self.blobs[place.rpartition("/")[2]] = body
            return 201, {}, b""
        found = self.blobs.get(place.rpartition("/")[2])
        return (404, {}, b"") if found is None else (200, {}, found)


@contextmanager
def in_process() -> Iterator[Registry]:
    """Serve a registry from a thread."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            registry.seen.append((self.command, self.path, self.headers.get("Authorization", "")))
            answer = registry.answer(self.command, self.path, body)
            status, headers, content = registry.change(self.command, self.path, dict(self.headers), answer)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = do  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        registry.host = f"127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def debian(program: str, folder: Path) -> Iterator[str]:
    """Run docker-registry on a free port and yield its host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{free.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '{host}'}}\n"
    )
    server = subprocess.Popen([program, "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(500):
            try:
                urllib.request.urlopen(f"http://{host}/v2/", timeout=5).close()
                break
            except urllib.error.URLError:
                time.sleep(0.02)
        yield host
    finally:
        server.kill()
        server.wait()
