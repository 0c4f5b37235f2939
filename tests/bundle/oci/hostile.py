"""Serve a registry that may do anything, and a foreign host, both on this machine.

Both record the requests that they receive, so that a test can check that no login was sent to the wrong host.
"""

from __future__ import annotations

import base64
import json
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .registry import Registry

PASSWORD, TOKEN, COOKIE = "hunter2", "opened-by-token", "session-of-registry"
LOGIN = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
SECRETS = (PASSWORD, TOKEN, COOKIE, LOGIN)
BACK = "/back-from-the-foreign"
"""The path at the registry to which the foreign host leads back: no login goes there either."""

Reply = bytes | Iterable[bytes] | None


@dataclass
class Asked:
    """Hold one request. Its body is read only when `body` is called."""

    method: str
    path: str
    head: str
    body: Callable[[], bytes] = lambda: b""


def response(status: int = 200, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


@dataclass
class Server:
    """Serve one host. If `script` does not answer a request, `otherwise` does."""

    otherwise: Callable[[Asked], Reply]
    host: str = ""
    seen: list[Asked] = field(default_factory=list)
    script: Callable[[Asked], Reply] = lambda asked: None
    closing: threading.Event = field(default_factory=threading.Event)

    def drip(self, parts: Iterable[bytes], pause_s: float = 0.05) -> Iterator[bytes]:
        """Yield `parts`, slowly, until the test ends."""
        for part in parts:
            if self.closing.wait(pause_s):
                return
            yield part

    def silence(self) -> Iterator[bytes]:
        """Yield nothing and keep the connection open."""
        self.closing.wait(30)
        yield b""

    def serve(self, connection: socketserver.StreamRequestHandler) -> None:
        if connection.rfile.peek(1)[:1] == b"\x16":  # type: ignore[attr-defined]
            return  # the client starts TLS, which this host does not support
        lines = [connection.rfile.readline(65536)]
        while lines[-1].strip():
            lines.append(connection.rfile.readline(65536))
        head = b"".join(lines).decode("latin-1")
        method, path, *_ = [*head.split(" ", 2), "", ""]
        length = next((int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")), 0)
        asked = Asked(method, path, head, lambda: connection.rfile.read(length))
        self.seen.append(asked)
        reply = self.script(asked)
        reply = self.otherwise(asked) if reply is None else reply
        for part in [reply] if isinstance(reply, bytes) else reply or ():
            connection.wfile.write(part)


@dataclass
class Hostile:
    """Hold the registry `home` and the foreign host `other`, which must not receive its login."""

    store: Registry
    home: Server
    other: Server

    def leaked(self) -> list[str]:
        """Return the requests that contain a secret but must not."""
        foreign = self.other.seen + [asked for asked in self.home.seen if asked.path.startswith(BACK)]
        return [asked.head for asked in foreign if any(secret in asked.head for secret in SECRETS)]


@contextmanager
def hostile(folder: Path, blobs: Mapping[str, bytes]) -> Iterator[Hostile]:
    """Serve both hosts. The login for `home` is in `folder`/config.json, and `home` has the blobs."""
    store = Registry()
    store.blobs = dict(blobs)

    def honest(asked: Asked) -> Reply:
        status, headers, content = store.answer(asked.method, asked.path, asked.body())
        lines = [f"{name}: {value}" for name, value in headers.items()]
        return response(status, b"" if asked.method == "HEAD" else content, *lines, length=len(content))

    def foreign(asked: Asked) -> Reply:
        challenge = f'Bearer realm="http://{asked.head.split("Host: ")[-1].split()[0]}/token"'
        return response(401, b"", f"WWW-Authenticate: {challenge}")

    servers = [Server(honest), Server(foreign)]
    running = [start(server) for server in servers]
    found = Hostile(store, *servers)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"auths": {found.home.host: {"auth": LOGIN}}}))
    try:
        yield found
    finally:
        for server, tcp in zip(servers, running, strict=True):
            server.closing.set()
            tcp.shutdown()
            tcp.server_close()


def start(server: Server, context: ssl.SSLContext | None = None) -> socketserver.ThreadingTCPServer:
    """Serve one host until it is shut down. It uses TLS if `context` is given."""

    class Handler(socketserver.StreamRequestHandler):
        def setup(self) -> None:
            if context is not None:
                self.request = context.wrap_socket(self.request, server_side=True)
            super().setup()

        def finish(self) -> None:
            try:
                super().finish()
            finally:
                self.request.close()  # over TLS, this is not the socket that the server closes

        def handle(self) -> None:
            try:
                server.serve(self)
            except (OSError, ValueError):
                self.close_connection = True  # the client closed the connection, as it should

    class Tcp(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close, request_queue_size = True, False, 64

        def handle_error(self, request: object, client_address: object) -> None:
            del request, client_address

    tcp = Tcp(("127.0.0.1", 0), Handler)
    server.host = f"127.0.0.1:{tcp.server_address[1]}"
    threading.Thread(target=tcp.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return tcp
