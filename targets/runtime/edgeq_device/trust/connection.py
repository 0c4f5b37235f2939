"""Connect to an untrusted server. The time of every wait and the size of every answer are limited."""

from __future__ import annotations

import base64
import io
import ipaddress
import json
import os
import re
import socket
import ssl
import time
from base64 import b64encode
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Tuple, Union
from urllib.parse import unquote, urldefrag, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.system.files import open_file, read_file
from edgeq_device.system.relay import escape

AWAY = "it leads away from https"
PORTS = {"https": 443, "http": 80}
_NO_ADDRESS = "not a valid address"
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][\x21\x22\x24-\x7e]*)?",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True)
class Address:
    """Describe an absolute http or https URL."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def origin(self) -> Tuple[str, str, int]:
        """Return the scheme, host and port, which together decide whether a login may be sent."""
        return self.scheme, self.host, self.port

    @property
    def place(self) -> str:
        """Return HOST:PORT. An IPv6 address is in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Return whether the host is this machine, by its name or a loopback address."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def join(self, reference: str) -> Address:
        """Return the address of `reference`, which is absolute or relative to this address.

        Raises:
            ValueError: `reference` does not lead to an address that edgeq follows. The message does not repeat it,
                because it may contain a token.
        """
        try:
            joined = urldefrag(urljoin(f"{self.scheme}://{self.place}{self.target}", reference)).url
        except ValueError:
            raise ValueError(_NO_ADDRESS) from None
        return parse_address(joined)


def parse_address(text: str) -> Address:
    """Return the address in `text`, which must be plain ASCII without user, password or fragment.

    Raises:
        ValueError: for the same reasons as `Address.join`.
    """
    match = _URL.fullmatch(text)
    if match is None:
        raise ValueError(_NO_ADDRESS if re.match("https?:", text, re.IGNORECASE) else AWAY)
    scheme, target = match["scheme"].lower(), match["target"] or ""
    # The pattern permits five digits, which may exceed 65535.
    port = int(match["port"] or PORTS[scheme])
    if not 0 < port < 65536:
        raise ValueError(_NO_ADDRESS)
    return Address(scheme, match["host"].lower().strip("[]"), port, target if target[:1] == "/" else f"/{target}")


CHUNK = 64 * 1024
_MAX_HEAD = 256 * 1024
"""Limit on the bytes before the body of an answer: status lines and headers, including those of interim answers."""
# Room for the framing of short bodies.
_MAX_OVERHEAD = 256 * 1024
# A name may have any number of addresses, and each attempt takes time.
_MAX_CONNECTS = 8
# How soon a wait notices that the transfer was stopped.
_POLL_S = 0.5


@dataclass(frozen=True)
class Limits:
    """Limit how slow a registry may be.

    Attributes:
        answer_s: maximum seconds from the start of a request to the headers of its answer. The transfer of a body may
            take this many seconds longer than it would at `least_rate`.
        least_rate: minimum rate of each body, sent or received, in bytes a second.
        total_s: maximum seconds for a whole push or pull. Each file adds `file_s` seconds to this limit, and each byte
            adds 1 / `total_rate`.
    """

    answer_s: float = 60
    least_rate: float = 1000
    total_s: float = 300
    file_s: float = 1
    total_rate: float = 10_000


LIMITS = Limits()


class Broken(HTTPException):
    """Report that the connection failed, was too slow, or carried too many bytes."""


class Deadline:
    """Hold the time at which a whole push or pull must end."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._started = time.monotonic()
        self._total_s = limits.total_s

    def add_time(self, files: int, size: int) -> None:
        """Add time for `files` files of `size` bytes in all."""
        self._total_s += files * self.limits.file_s + size / self.limits.total_rate

    def stop(self) -> None:
        """End every exchange that is still running."""
        self._total_s = 0

    def check_time_left(self) -> float:
        """Return the seconds that are left.

        Raises:
            Broken: no time is left.
        """
        remaining = self._started + self._total_s - time.monotonic()
        if remaining <= 0:
            raise Broken(f"it took over {self._total_s:.0f} s in all")
        return remaining


class Connection(io.RawIOBase):
    """Wrap a socket. Every wait ends after a limited time, and the number of received bytes is limited.

    `HTTPResponse` reads from this object as it would from a socket.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline, patience: float) -> None:
        self._sock = sock
        self._deadline = deadline
        self._patience = patience
        """Seconds for which the other end may still delay. Each byte of a body adds time."""
        self._bytes_left = _MAX_HEAD
        self._paced = False
        self._tunnel: Optional[HTTPResponse] = None

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return a stream that reads the answer and closes the socket."""
        del mode
        return io.BufferedReader(self, CHUNK)

    def readable(self) -> bool:
        """Return True, because `io` requires it of a stream that can be read."""
        return True

    def expect_head(self) -> None:
        """Prepare to wait for the status and the headers. They have no minimum rate."""
        self._patience, self._paced, self._bytes_left = self._deadline.limits.answer_s, False, _MAX_HEAD

    def expect_body(self, max_bytes: int) -> None:
        """Prepare to send or receive a body at `least_rate` or more. A received body may have at most `max_bytes`
        bytes.
        """
        self._patience, self._paced = self._deadline.limits.answer_s, True
        self._bytes_left = 2 * max_bytes + _MAX_OVERHEAD  # the framing of chunks counts too

    def readinto(self, buffer: Any) -> int:
        """Receive the bytes that have arrived."""
        count = self._wait_and(self._sock.recv_into, buffer)
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise Broken("a body longer than stated" if self._paced else f"headers of over {_MAX_HEAD} bytes")
        return count

    def sendall(self, data: bytes) -> None:
        """Send all of `data`."""
        view = memoryview(data)
        while view:
            view = view[self._wait_and(self._sock.send, view[:CHUNK]) :]

    def secure(self, host: str) -> None:
        """Use TLS from now on, and verify that the other end is `host`."""
        try:
            self._sock.settimeout(self._check_time_left())
            # The default context verifies the certificate and the name of the host.
            self._sock = ssl.create_default_context().wrap_socket(self._sock, server_hostname=host)
        except OSError as error:
            raise Broken(str(error)) from error

    def tunnel(self, to: Address, login: str) -> None:
        """Make the proxy at the other end connect to `to`.

        Raises:
            Broken: the proxy refuses.
        """
        lines = [f"CONNECT {to.place} HTTP/1.1", f"Host: {to.place}"]
        lines += [f"Proxy-Authorization: Basic {login}"] if login else []
        self.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        self._tunnel = self.read_response("CONNECT")  # kept, because a garbage-collected response closes the socket
        if self._tunnel.status != 200:
            raise Broken(f"the proxy refuses, HTTP {self._tunnel.status}")

    def read_response(self, method: str) -> HTTPResponse:
        """Read the status and the headers of the next answer, and return the answer."""
        response = HTTPResponse(self, method=method)  # type: ignore[arg-type]  # it takes makefile() of it alone
        response.begin()
        return response

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
        super().close()

    def _wait_and(self, act: Callable[[Any], int], buffer: Any) -> int:
        limits, count = self._deadline.limits, -1
        while count < 0:
            self._sock.settimeout(min(self._check_time_left(), _POLL_S))
            started = time.monotonic()
            try:
                count = act(buffer)
            except socket.timeout:
                count = -1
            except OSError as error:
                raise Broken(str(error)) from error
            self._patience -= time.monotonic() - started
        if self._paced:
            self._patience = min(limits.answer_s, self._patience + count / limits.least_rate)
        return count

    def _check_time_left(self) -> float:
        remaining, limits = min(self._patience, self._deadline.check_time_left()), self._deadline.limits
        if remaining <= 0:
            slow = f"under {limits.least_rate:g} bytes a second for {limits.answer_s:g} s"
            raise Broken(slow if self._paced else f"no answer within {limits.answer_s:g} s")
        return remaining


def connect(address: Address, deadline: Deadline) -> Connection:
    """Open a connection to `address`. Use the proxy that the environment sets, unless the address is this machine."""
    host, port, login = (address.host, address.port, "") if address.local else _find_route(address)
    started, patience = time.monotonic(), min(deadline.limits.answer_s, deadline.check_time_left())
    sock = _dial(host, port, patience)
    connection = Connection(sock, deadline, patience - (time.monotonic() - started))
    try:
        if (host, port) != (address.host, address.port):
            connection.tunnel(address, login)
        if address.scheme == "https":
            connection.secure(address.host)
    except BaseException:
        connection.close()
        raise
    return connection


def _dial(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to the first address of `host` that accepts a connection, within `seconds` for all attempts together."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[:_MAX_CONNECTS]
    except (OSError, UnicodeError) as error:
        raise Broken(str(error)) from error
    failure: Optional[OSError] = None
    for *_, place in addresses:
        try:
            # One dead address must not use up the time of the others.
            sock = socket.create_connection((str(place[0]), int(place[1])), timeout=seconds / len(addresses))
        except OSError as error:
            failure = error
        else:
            # A request is sent in pieces, which must not wait for acknowledgements.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise Broken(str(failure)) from failure


def _find_route(address: Address) -> Tuple[str, int, str]:
    """Return the host and port of `address`, or those of the proxy through which to reach it. Also return the base64 of
    the login for the proxy.
    """
    text = "" if proxy_bypass(address.place) else getproxies().get("https", "")
    if not text:
        return address.host, address.port, ""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or PORTS["http"]
    except ValueError:
        host, port = None, 0
    if not host or parts.scheme != "http":
        raise Broken("https_proxy is not the address of an http proxy")
    login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    return host, port, b64encode(login).decode("ascii") if parts.username else ""


Body = Union[bytes, Path, None]


class _Content(io.RawIOBase):
    """Read the body of an answer. An error is reported in one line that names `title`."""

    def __init__(self, response: HTTPResponse, title: str) -> None:
        self._response = response
        self._title = title

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Do not use HTTPResponse.read: a chunk of size -1 makes it read everything at once.
        with translate_errors(self._title):
            return self._response.readinto(buffer)

    def close(self) -> None:
        self._response.close()
        super().close()


@dataclass(frozen=True)
class ServerRequest:
    """Describe a request to one server.

    Attributes:
        headers: names and values in plain ASCII; `Host` and the headers that describe `body` are added.
        body: bytes, or the file that contains them.
        max_bytes: maximum size of the answer's body in bytes.
    """

    method: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = None
    max_bytes: int = 0


@dataclass(frozen=True)
class Reply:
    """Hold a server's answer to one request to `address`."""

    address: Address
    status: int
    headers: Message
    body: IO[bytes]

    def __enter__(self) -> Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self.body.close()

    def find_location(self) -> Address:
        """Return the address in the Location header."""
        location = self.headers.get("Location")
        if location is None:
            raise ValueError(f"HTTP {self.status} without a Location")
        return self.address.join(location)


@contextmanager
def translate_errors(title: str) -> Iterator[None]:
    """Turn errors of a connection into RuntimeUnavailableError."""
    try:
        yield
    except (HTTPException, ValueError) as error:
        # The text of the error may quote the server.
        text = escape(str(error))[:200]
        raise RuntimeUnavailableError(f"{title}: the connection failed ({text})", "Check the network") from error


def _send_body(connection: Connection, body: Union[bytes, Path]) -> Optional[Broken]:
    """Send `body`. A server may answer and close before it has read the whole body, for instance to ask for a login.
    Return the error in this case, because the answer can still be read (RFC 9112, 9.5).
    """
    connection.expect_body(0)
    try:
        with io.BytesIO(body) if isinstance(body, bytes) else open_file(body) as stream:
            for chunk in iter(lambda: stream.read(CHUNK), b""):
                connection.sendall(chunk)
    except Broken as error:
        if not isinstance(error.__cause__, (BrokenPipeError, ConnectionResetError)):
            raise
        return error
    return None


def exchange(request: ServerRequest, address: Address, deadline: Deadline, title: str) -> Reply:
    """Send `request` to `address` and return its answer. Messages call the server `title`.

    Raises:
        HTTPException: the connection failed, was too slow, or carried too many bytes.
    """
    body = request.body
    usual = f":{PORTS[address.scheme]}"
    host = address.place[: -len(usual)] if address.place.endswith(usual) else address.place
    # A compressed body could grow without limit, and a kept connection could mix answers.
    headers = {"Host": host, "Connection": "close", "Accept-Encoding": "identity", **request.headers}
    if body is not None:
        headers["Content-Length"] = str(body.stat().st_size if isinstance(body, Path) else len(body))
    lines = [f"{request.method} {address.target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    connection = connect(address, deadline)
    try:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        closed = None
        if body is not None:
            closed = _send_body(connection, body)
            connection.expect_head()
        try:
            response = connection.read_response(request.method)
        except HTTPException as error:
            if closed is None:
                raise
            raise closed from error
    except BaseException:
        connection.close()
        raise
    connection.expect_body(request.max_bytes)
    return Reply(address, response.status, response.headers, io.BufferedReader(_Content(response, title), CHUNK))


_MAX_CHALLENGES = 8192
_PART = re.compile(r"""([\w!#$%&'*+.^`|~-]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+)))?""", re.ASCII)
_ESCAPED = re.compile(r"\\(.)")


def parse_challenges(headers: Iterable[str]) -> List[Tuple[str, Dict[str, str]]]:
    """Return the scheme and the parameters of each challenge. The names of parameters are in lower case.

    Args:
        headers: the values of all WWW-Authenticate headers; each may contain several challenges.
    """
    schemes: List[Tuple[str, Dict[str, str]]] = []
    # The pattern runs over a server's text, so that text is cut.
    for name, quoted, unquoted in _PART.findall(",".join(headers)[:_MAX_CHALLENGES]):
        value = _ESCAPED.sub(r"\1", quoted) or unquoted
        if not value:
            schemes.append((name.lower(), {}))
        elif schemes:
            schemes[-1][1].setdefault(name.lower(), value)
    return schemes


def read_credentials(host: str) -> str:
    """Return the base64 of USER:PASSWORD that `docker login` or `oras login` stored for exactly `host`, or ""."""
    try:
        folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
        config: Any = json.loads(read_file(folder / "config.json"))
        login = config["auths"][host]["auth"]
        # Encode it again, so that no line break of the file gets into a header.
        return base64.b64encode(base64.b64decode(login)).decode("ascii")
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return ""
