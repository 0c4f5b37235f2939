"""Test exchanges with a server that answers before it has read the whole request."""

from __future__ import annotations

import socket
import threading

import pytest
from edgeq_device.trust.connection import Broken, Deadline, Limits, ServerRequest, exchange, parse_address

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno"


def sent_to_a_server_that_says(answer: bytes) -> tuple[int, bytes]:
    """Send 32 MB to a server that reads only the headers, sends `answer` and closes. Return status and body."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = server.accept()
        with peer:
            peer.recv(1 << 10)
            peer.sendall(answer)
            peer.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve)
    thread.start()
    address = parse_address(f"http://127.0.0.1:{server.getsockname()[1]}/blob")
    try:
        request = ServerRequest("PUT", {}, b"x" * (32 << 20), 100)
        with exchange(request, address, Deadline(Limits(answer_s=10)), "the registry") as found:
            return found.status, found.body.read()
    finally:
        thread.join()
        server.close()


def test_an_answer_that_comes_before_the_end_of_the_body_is_read() -> None:
    assert sent_to_a_server_that_says(REFUSAL) == (401, b"no")


def test_a_connection_that_closes_without_an_answer_is_an_error() -> None:
    with pytest.raises(Broken):
        sent_to_a_server_that_says(b"")
