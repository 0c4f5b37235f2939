"""Test a registry over TLS and through a proxy: each host gets only its own login."""

from __future__ import annotations

import datetime
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from edgeq_device.errors import RuntimeUnavailableError
from edgeq_device.trust.connection import Limits
from edgeq_device.trust.registry import parse_reference, pull

from .hostile import LOGIN, SECRETS, TOKEN, Asked, Reply, Server, response, start
from .scenarios import SLOW, guarded

pytest.importorskip("cryptography")

REGISTRY, AUTH, FOREIGN, UNKNOWN = "registry.example.com", "auth.example.com", "foreign.example.com", "other.example"
PROXY_LOGIN = "cHJveHk6cHJveHk="
CONNECTED = b"HTTP/1.1 200 x\r\n\r\n"
FAST = Limits(answer_s=0.2, total_s=2)


@dataclass
class Net:
    """Hold a registry, its token service, and a foreign host. Only a proxy reaches them."""

    servers: dict[str, Server]
    proxy: Server
    digest: str

    def pull(self, output: Path, limits: Limits | None = None) -> None:
        reference = parse_reference(f"{REGISTRY}/models/net@{self.digest}")
        pull(reference, output, **({} if limits is None else {"limits": limits}))

    def refused(self, output: Path, says: str, limits: Limits | None = None) -> None:
        with pytest.raises(RuntimeUnavailableError, match=says) as caught:
            self.pull(output, limits)
        assert not any(secret in str(caught.value) for secret in (*SECRETS, "proxy:proxy", "pr/oxy"))
        sent = [asked.head for asked in self.servers[FOREIGN].seen + self.proxy.seen]
        assert not any(secret in head for secret in SECRETS for head in sent)


@pytest.fixture
def net(stored: tuple[dict[str, bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Net]:
    context = _context(tmp_path, REGISTRY, AUTH, FOREIGN)
    blobs, digest = stored

    def registry(asked: Asked) -> Reply:
        content = blobs.get(asked.path.rpartition("/")[2])
        return response(404) if content is None else response(200, content)

    def foreign(asked: Asked) -> Reply:
        del asked
        return response(401, b"", f'WWW-Authenticate: Bearer realm="https://{FOREIGN}/token"')

    def token(asked: Asked) -> Reply:
        granted = f"Basic {LOGIN}" in asked.head
        return response(200, json.dumps({"token": TOKEN}).encode()) if granted else response(401)

    servers = {REGISTRY: Server(registry), AUTH: Server(token), FOREIGN: Server(foreign)}
    proxy = Server(lambda asked: None)
    running = [start(server, context) for server in servers.values()]
    running.append(_start_proxy(proxy, {**servers, UNKNOWN: servers[REGISTRY]}))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {REGISTRY: {"auth": LOGIN}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "tls.crt"))
    monkeypatch.setenv("https_proxy", f"http://proxy:proxy@{proxy.host}")
    yield Net(servers, proxy, digest)
    for server in (*servers.values(), proxy):
        server.closing.set()
    for tcp in running:
        tcp.shutdown()
        tcp.server_close()


def test_each_gets_its_own_login(net: Net, tmp_path: Path) -> None:
    """The proxy gets its own login, the realm that the registry names gets the registry's, and the registry gets the
    token.
    """
    challenge = f'Bearer realm="https://{AUTH}/token"'
    net.servers[REGISTRY].script = lambda asked: guarded(asked, challenge)
    net.pull(tmp_path / "out")
    assert (tmp_path / "out" / "manifest.json").exists()
    for name, secret in ((REGISTRY, TOKEN), (AUTH, LOGIN)):
        heads = [asked.head for asked in net.servers[name].seen]
        assert {s for s in (*SECRETS, PROXY_LOGIN) for head in heads if s in head} == {secret}
    assert all(f"Proxy-Authorization: Basic {PROXY_LOGIN}" in asked.head for asked in net.proxy.seen)
    assert {asked.path for asked in net.proxy.seen} == {f"{REGISTRY}:443", f"{AUTH}:443"}
    assert not any(secret in asked.head for asked in net.proxy.seen for secret in SECRETS)


@pytest.mark.parametrize(
    ("location", "says"),
    [
        (f"http://{REGISTRY}/x", "leads away from https"),
        ("http://127.0.0.1:1/x", "leads away from https"),
        ("http://localhost/x", "leads away from https"),
        (f"https://{FOREIGN}/x", "demands a login"),
        (f"https://{REGISTRY}:8443/x", "the proxy refuses, HTTP 502"),
        (f"https://{UNKNOWN}/x", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_refuses_redirects_away_from_https(location: str, says: str, net: Net, tmp_path: Path) -> None:
    def script(asked: Asked) -> Reply:
        moved = response(307, b"", f"Location: {location}")
        return guarded(asked, "Basic realm=x") or (moved if "/blobs/" in asked.path else None)

    net.servers[REGISTRY].script = script
    net.refused(tmp_path / "out", says)


@pytest.mark.parametrize("realm", [f"http://{AUTH}/token", f"http://{REGISTRY}/token", "http://127.0.0.1:1/token"])
def test_a_realm_without_tls(realm: str, net: Net, tmp_path: Path) -> None:
    net.servers[REGISTRY].script = lambda asked: guarded(asked, f'Bearer realm="{realm}"')
    net.refused(tmp_path / "out", "needs a login")
    assert {asked.path for asked in net.proxy.seen} == {f"{REGISTRY}:443"}


def test_the_proxy_refuses(net: Net, tmp_path: Path) -> None:
    net.proxy.script = lambda asked: response(407, b"", "Proxy-Authenticate: Basic realm=x")
    net.refused(tmp_path / "out", "the proxy refuses, HTTP 407")


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 x\r\n", CONNECTED, CONNECTED + b"\x16\x03"])
def test_a_slow_proxy_or_handshake(begun: bytes, net: Net, tmp_path: Path) -> None:
    def script(asked: Asked) -> Iterator[bytes]:
        del asked
        yield begun
        yield from net.proxy.silence()

    net.proxy.script = script
    net.refused(tmp_path / "out", f"{SLOW}|timed out", FAST)


@pytest.mark.parametrize(
    "proxy", ["socks5://proxy:proxy@127.0.0.1:1", "https://proxy:proxy@127.0.0.1:1", "http://proxy:pr/oxy@x"]
)
def test_refuses_addresses_of_other_proxies(
    proxy: str, net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", proxy)
    net.refused(tmp_path / "out", "not the address of an http proxy")


def _context(folder: Path, *names: str) -> ssl.SSLContext:
    """Return a server context with a certificate for `names`. Clients trust it through tls.crt."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key, subject = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=test")
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "tls.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.pem")
    return context


def _start_proxy(proxy: Server, servers: dict[str, Server]) -> socketserver.ThreadingTCPServer:
    """Serve CONNECT to port 443 of each name, unless `proxy.script` answers."""

    def copied(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()

    def serve(connection: socketserver.StreamRequestHandler) -> None:
        head = b"".join(iter(lambda: connection.rfile.readline().strip(b"\r\n") + b"\n", b"\n")).decode()
        asked = Asked("CONNECT", head.split()[1], head)
        proxy.seen.append(asked)
        reply = proxy.script(asked)
        name, _, port = asked.path.partition(":")
        if reply is None and (name not in servers or port != "443"):
            reply = response(502)
        if reply is not None:
            for part in [reply] if isinstance(reply, bytes) else reply:
                connection.wfile.write(part)
            return
        host, _, inner = servers[name].host.partition(":")
        with socket.create_connection((host, int(inner)), timeout=30) as behind:
            connection.wfile.write(b"HTTP/1.1 200 x\r\n\r\n")
            back = threading.Thread(target=copied, args=(behind, connection.connection), daemon=True)
            back.start()
            copied(connection.connection, behind)
            back.join()

    proxy.serve = serve  # type: ignore[method-assign]
    return start(proxy)
