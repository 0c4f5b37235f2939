"""One HTTP exchange with a server that is not trusted: no redirect is followed, no cookie kept, and no login sent but
the one that the caller gives."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any, Dict, Iterable, Iterator, List, Mapping, Tuple, Union

from edgeq_device.connection import CHUNK, PORTS, Address, Connection, Deadline, connect
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.relay import printable

Body = Union[bytes, Path, None]


class _Content(io.RawIOBase):
    """The body of an answer; what goes wrong with it is one line about `where`."""

    def __init__(self, response: HTTPResponse, where: str) -> None:
        self._response = response
        self._where = where

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # Not HTTPResponse.read: a chunk of size -1 makes it read all that comes at once.
        with connected(self._where):
            return self._response.readinto(buffer)

    def close(self) -> None:
        self._response.close()
        super().close()


@dataclass(frozen=True)
class Request:
    """A request to one server.

    Attributes:
        headers: names and values of plain ASCII; `Host` and what describes `body` are added.
        body: bytes, or the file that has them.
        most: bytes that the body of the answer may have.
    """

    method: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Body = None
    most: int = 0


@dataclass(frozen=True)
class Answer:
    """The answer of a server to one request at `address`."""

    address: Address
    status: int
    headers: Message
    body: IO[bytes]

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self.body.close()

    def leads_to(self) -> Address:
        """Return the address in the Location header."""
        location = self.headers.get("Location")
        if location is None:
            raise ValueError(f"HTTP {self.status} without a Location")
        return self.address.join(location)


@contextmanager
def connected(where: str) -> Iterator[None]:
    """Turn what goes wrong with a connection into RuntimeUnavailableError."""
    try:
        yield
    except (HTTPException, ValueError) as error:
        # Its text may quote the server.
        text = printable(str(error))[:200]
        raise RuntimeUnavailableError(f"{where}: the connection failed ({text})", "Look at the network") from error


def exchange(request: Request, address: Address, deadline: Deadline, where: str) -> Answer:
    """Send `request` to `address` and return its answer; `where` names it in messages.

    Raises:
        HTTPException: the connection failed, was too slow, or carried too much.
    """
    body = request.body
    headers = {"Host": _host_header(address), "Connection": "close", "Accept-Encoding": "identity", **request.headers}
    if body is not None:
        headers["Content-Length"] = str(body.stat().st_size if isinstance(body, Path) else len(body))
    lines = [f"{request.method} {address.target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    connection = connect(address, deadline)
    try:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        if body is not None:
            _send_body(connection, body)
        response = connection.response(request.method)
    except BaseException:
        connection.close()
        raise
    connection.expect_body(request.most)
    return Answer(address, response.status, response.headers, io.BufferedReader(_Content(response, where), CHUNK))


def _host_header(address: Address) -> str:
    """Return HOST, and the port unless it is the scheme's own."""
    usual = f":{PORTS[address.scheme]}"
    return address.place[: -len(usual)] if address.place.endswith(usual) else address.place


def _send_body(connection: Connection, body: Union[bytes, Path]) -> None:
    connection.expect_body(0)
    with io.BytesIO(body) if isinstance(body, bytes) else body.open("rb") as stream:
        for chunk in iter(lambda: stream.read(CHUNK), b""):
            connection.sendall(chunk)
    connection.expect_head()


_MAX_CHALLENGES = 8192
_PART = re.compile(r"""([\w!#$%&'*+.^`|~-]+)(?:[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^\s",]+)))?""", re.ASCII)
_ESCAPED = re.compile(r"\\(.)")


def challenges(headers: Iterable[str]) -> List[Tuple[str, Dict[str, str]]]:
    """Return the scheme and the parameters of each challenge, their names in lower case.

    Args:
        headers: the values of all WWW-Authenticate headers; each may have several challenges.
    """
    found: List[Tuple[str, Dict[str, str]]] = []
    for name, quoted, plain in _PART.findall(",".join(headers)[:_MAX_CHALLENGES]):
        value = _ESCAPED.sub(r"\1", quoted) or plain
        if not value:
            found.append((name.lower(), {}))
        elif found:
            found[-1][1].setdefault(name.lower(), value)
    return found


def credentials(host: str) -> str:
    """Return base64 of USER:PASSWORD as `docker login` and `oras login` keep it for exactly `host`, or ""."""
    try:
        folder = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()
        known: Any = json.loads((folder / "config.json").read_bytes())
        login = known["auths"][host]["auth"]
        return base64.b64encode(base64.b64decode(login)).decode("ascii")
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return ""
