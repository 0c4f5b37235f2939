"""List what a hostile registry does: one line for each scenario, with its name, its behaviour, and how the command must
end.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .hostile import BACK, COOKIE, LOGIN, TOKEN, Asked, Hostile, Reply, response

Script = Callable[[Hostile, Asked], Reply]
SLOW = "no answer within|bytes a second for|it took over"
BROKEN = "the connection failed"


def _nothing(hosts: Hostile, asked: Asked) -> Reply:
    del hosts, asked
    return None


@dataclass(frozen=True)
class Scenario:
    """Describe one behaviour of a registry.

    Attributes:
        home, other: the answers of the registry and of the foreign host. If they are None, the registry is honest and
            the foreign host demands a login.
        says: a pattern of the error's line; "" if the command succeeds.
        push: True for a push, False for a pull.
        slow: True if the limits of `FAST` apply.
    """

    name: str
    home: Script
    says: str = ""
    other: Script = _nothing
    push: bool = False
    slow: bool = False


def led(hosts: Hostile, asked: Asked, target: str) -> Reply:
    """Lead to `target`, by a redirect or as the location of an upload."""
    place = target.format(home=hosts.home.host, other=hosts.other.host, port=hosts.other.host.rpartition(":")[2])
    return response(202 if asked.method == "POST" else 307, b"", f"Location: {place}")


def guarded(asked: Asked, challenge: str) -> Reply:
    """Demand the login first."""
    granted = f"Authorization: Basic {LOGIN}", f"Authorization: Bearer {TOKEN}"
    if any(line in asked.head for line in granted):
        return None
    return response(401, b"", f"Set-Cookie: {COOKIE}=1", *(f"WWW-Authenticate: {c}" for c in challenge.split("\n")))


def _leads(where: str, target: str) -> Script:
    def script(hosts: Hostile, asked: Asked) -> Reply:
        if asked.path.startswith(BACK):
            return response(401, b"", "WWW-Authenticate: Basic realm=x")
        wanted = asked.method == "POST" if where == "upload" else f"/{where}/" in asked.path and asked.method == "GET"
        return guarded(asked, "Basic realm=x") or (led(hosts, asked, target) if wanted else None)

    return script


LOGINS = "edgeq sends a login only to its own host"
TARGETS = {
    "absolute": ("http://{other}/x?digest=1", LOGINS),
    "without-scheme": ("//{other}/x", LOGINS),
    "by-name": ("http://localhost:{port}/x", LOGINS),
    "shouted": ("HTTP://{other}/x", LOGINS),
    "query-alone": ("http://{other}?x", LOGINS),
    "home-as-user": ("http://{home}@{other}/x", "not a valid address"),
    "login-in-it": ("http://a:b@{other}/x", "not a valid address"),
    "backslash": ("http://{other}\\@{home}/x", "not a valid address"),
    "port-too-large": ("http://127.0.0.1:99999/x", "not a valid address"),
    "not-ascii": ("http://127.0.0.1\xe9/x", "not a valid address"),
    "bad-ipv6": ("http://[::1/x", "not a valid address"),
    "file": ("file:///etc/passwd", "leads away from https"),
    "ftp": ("ftp://{other}/x", "leads away from https"),
    "data": ("data:,x", "leads away from https"),
    "http-beyond": ("http://192.0.2.1/x", "leads away from https"),
    "http-looks-local": ("http://127.0.0.1.example.invalid/x", "leads away from https"),
    "tls-elsewhere": ("https://{other}/x", BROKEN),
}
PLACES = {"manifests": False, "blobs": False, "upload": True}


def _led_astray() -> Iterator[Scenario]:
    for (what, (target, says)), where in itertools.product(TARGETS.items(), ("blobs", "upload")):
        yield Scenario(f"{where}-{what}", _leads(where, target), says, push=PLACES[where])
    answers = {
        "basic": ("WWW-Authenticate: Basic realm=x",),
        "bearer-of-its-own": ('WWW-Authenticate: Bearer realm="http://{other}/token"',),
        "bearer-of-home": ('WWW-Authenticate: Bearer realm="http://{home}/token"',),
        "both": ('WWW-Authenticate: Basic realm=x, Bearer realm="http://{other}/token"',),
        "two-headers": ("WWW-Authenticate: Negotiate", "WWW-Authenticate: Basic realm=x"),
        "no-challenge": (),
    }
    for (what, lines), (where, push) in itertools.product(answers.items(), PLACES.items()):

        def other(hosts: Hostile, asked: Asked, lines: tuple[str, ...] = lines) -> Reply:
            del asked
            return response(401, b"", *(s.format(home=hosts.home.host, other=hosts.other.host) for s in lines))

        yield Scenario(f"{where}-foreign-{what}", _leads(where, "http://{other}/x"), LOGINS, other, push)
    back: Script = lambda hosts, asked: led(hosts, asked, f"http://{{home}}{BACK}")  # noqa: E731
    yield Scenario("there-and-back", _leads("blobs", "http://{other}/x"), LOGINS, back)
    further: Script = lambda hosts, asked: led(hosts, asked, f"http://{{other}}{asked.path}x")  # noqa: E731
    yield Scenario("chain", _leads("blobs", "http://{other}/x"), "over 5 redirects", further)
    yield Scenario("loop", lambda hosts, asked: led(hosts, asked, asked.path), "over 5 redirects")
    yield Scenario("no-location", lambda *_: response(302), "HTTP 302 without a Location")
    proxied: Script = lambda *_: response(407, b"", "Proxy-Authenticate: Basic realm=x")  # noqa: E731
    yield Scenario("foreign-is-a-proxy", _leads("blobs", "http://{other}/x"), "HTTP 407", proxied)
    moved: Script = lambda hosts, asked: led(hosts, asked, "http://{other}/x") if asked.method == "PUT" else None  # noqa: E731
    yield Scenario("upload-redirected", moved, "HTTP 307", push=True)
    lost: Script = lambda _, asked: response(202) if asked.method == "POST" else None  # noqa: E731
    yield Scenario("upload-nowhere", lost, "HTTP 202 without a Location", push=True)

    def relative(hosts: Hostile, asked: Asked) -> Reply:
        del hosts
        return guarded(asked, "Basic realm=x") or (
            response(202, b"", "Location: ../../blobs/uploads/1?a=b") if asked.method == "POST" else None
        )

    yield Scenario("upload-relative", relative, push=True)
    yield Scenario("cookies", _leads("blobs", "http://{other}/x"), LOGINS)

    def served(hosts: Hostile, asked: Asked) -> Reply:
        content = hosts.store.blobs.get(asked.path.partition("?")[0].rpartition("/")[2], b"")
        return response(200, content)

    def to_storage(hosts: Hostile, asked: Asked) -> Reply:
        challenge = f'Bearer realm="http://{hosts.home.host}/token",service=s'
        if asked.path.startswith("/token"):
            return response(200, json.dumps({"token": TOKEN}).encode())
        return guarded(asked, challenge) or (
            led(hosts, asked, f"http://{{other}}{asked.path}") if "/blobs/" in asked.path else None
        )

    yield Scenario("storage-elsewhere", to_storage, other=served)


NEEDS = "needs a login"
CHALLENGES = {
    "none": ("", NEEDS),
    "digest": ('Digest realm="x", nonce="y"', NEEDS),
    "no-realm": ("Bearer service=x", NEEDS),
    "realm-file": ('Bearer realm="file:///etc/passwd"', NEEDS),
    "realm-ftp": ('Bearer realm="ftp://{other}/token"', NEEDS),
    "realm-with-user": ('Bearer realm="http://{home}@{other}/token"', NEEDS),
    "realm-over-http": ('Bearer realm="http://192.0.2.1/token"', NEEDS),
    "realm-looks-local": ('Bearer realm="http://localhost.example.invalid/token"', NEEDS),
    "realm-relative": ('Bearer realm="/token"', NEEDS),
    "realm-fragment": ('Bearer realm="http://{home}/token#x"', NEEDS),
    "realm-unclosed": ('Bearer realm="http://{home}/token', NEEDS),
    "realm-too-long": ("Bearer " + "a" * 60_000 + "(", NEEDS),
    "quotes": ("Bearer realm=" + '"\\' * 4000, NEEDS),
    "realm-of-home": ('Bearer realm="http://{home}/token",scope="a b"', ""),
    "second-challenge": ('Negotiate abc==, Bearer error="x, y", realm="http://{home}/token?a=b"', ""),
    "second-header": ('Digest realm="x"\nbearer REALM="http://{home}/token"', ""),
    "realm-file-then-basic": ('Bearer realm="file:///x", Basic realm="y"', ""),
}
TOKENS = {
    "refused": (response(401, b"", 'WWW-Authenticate: Bearer realm="http://127.0.0.1:1/x"'), "login was refused"),
    "led-away": (None, LOGINS),
    "not-json": (response(200, b"<html>"), "is not valid JSON"),
    "not-text": (response(200, b'{"token": {"a": 1}}'), "sent no token"),
    "no-token": (response(200, b"{}"), "sent no token"),
    "line-break": (response(200, b'{"token": "a\\r\\nX: y"}'), "sent no token"),
    "token-large": (response(200, json.dumps({"token": "a" * 70_000}).encode()), "sent no token"),
    "answer-large": (response(200, b'{"token": "' + b"a" * (1 << 21) + b'"}'), "sent no token"),
    "deep": (response(200, b'{"token": ' + b"[" * 100_000), "nested"),
}


def _asked_to_log_in() -> Iterator[Scenario]:
    for what, (challenge, says) in CHALLENGES.items():

        def home(hosts: Hostile, asked: Asked, challenge: str = challenge) -> Reply:
            if asked.path.startswith("/token"):
                return response(200, json.dumps({"access_token": TOKEN}).encode())
            return guarded(asked, challenge.format(home=hosts.home.host, other=hosts.other.host))

        yield Scenario(f"challenge-{what}", home, says)
    for what, (answer, says) in TOKENS.items():

        def tokens(hosts: Hostile, asked: Asked, answer: bytes | None = answer) -> Reply:
            if asked.path.startswith("/token"):
                return answer or led(hosts, asked, "http://{other}/token")
            return guarded(asked, f'Bearer realm="http://{hosts.home.host}/token"')

        yield Scenario(f"token-{what}", tokens, says)


def _endless(part: bytes, start: bytes = b"") -> Iterator[bytes]:
    return itertools.chain([start], itertools.repeat(part))


OK = b"HTTP/1.1 200 x\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "continue-headers": (b"HTTP/1.1 100 Continue\r\n", b"X: y\r\n" * 100),
    "status": (b"HTTP/1.1 200 ", b"x" * 4096),
    "headers": (OK, b"X: y\r\n" * 100),
    "header": (OK + b"X: ", b"y" * 4096),
    "zeros": (b"", b"\0" * 4096),
    "body": (OK + b"\r\n", b"x" * 65536),
    "body-claimed": (OK + b"Content-Length: " + b"9" * 300 + b"\r\n\r\n", b"x" * 65536),
    "body-negative": (OK + b"Content-Length: -1\r\n\r\n", b"x" * 65536),
    "chunks": (CHUNKED, (b"40\r\n" + b"x" * 64 + b"\r\n") * 100),
    "chunk": (CHUNKED + b"ffffffffffff\r\n", b"x" * 65536),
    "chunk-negative": (CHUNKED + b"-1\r\n", b"x" * 65536),
    "chunk-extension": (CHUNKED + b"1;", b"x" * 4096),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n" * 100),
}
DRIPS: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "status": (b"", b"H"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers": (OK, b"X: y\r\n"),
    "body": (OK + b"Content-Length: 3000000\r\n\r\n", b"x"),
    "chunks": (CHUNKED, b"1\r\nx\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"X: y\r\n"),
}


def _at(where: str, reply: Callable[[Hostile], Reply]) -> Script:
    def script(hosts: Hostile, asked: Asked) -> Reply:
        if where == "token":
            if asked.path.startswith("/token"):
                return reply(hosts)
            return guarded(asked, f'Bearer realm="http://{hosts.home.host}/token"')
        return reply(hosts) if f"/{where}/" in asked.path else None

    return script


def _too_much() -> Iterator[Scenario]:
    for (what, (start, part)), where in itertools.product(FLOODS.items(), ("manifests", "blobs")):
        reply: Callable[[Hostile], Reply] = lambda _, start=start, part=part: _endless(part, start)  # type: ignore[misc]  # noqa: E731
        yield Scenario(f"flood-{what}-{where}", _at(where, reply), "the manifest states|that digest|connection failed")
    yield Scenario("cut-off", _at("blobs", lambda _: response(200, b"x", length=9)), "the manifest states|was changed")
    yield Scenario("closes", _at("blobs", lambda _: b""), "closed connection")
    yield Scenario("gibberish", _at("manifests", lambda _: b"\x1b[2J\x07all well\r\n\r\n"), BROKEN)


def _too_slow() -> Iterator[Scenario]:
    for what, (start, part) in DRIPS.items():
        for where in ("manifests", "blobs", "token"):
            reply: Callable[[Hostile], Reply] = lambda hosts, start=start, part=part: (  # type: ignore[misc]  # noqa: E731
                hosts.home.drip(_endless(part, start)) if part else hosts.home.silence()
            )
            if where != "token" or what in ("nothing", "body"):
                yield Scenario(f"slow-{what}-{where}", _at(where, reply), SLOW, slow=True)
    silent: Script = lambda hosts, asked: hosts.home.silence() if asked.method in ("POST", "PUT") else None  # noqa: E731
    yield Scenario("slow-push", silent, SLOW, push=True, slow=True)
    yield Scenario("slow-redirects", lambda hosts, _: _wait_and_lead(hosts), SLOW + "|redirects", slow=True)


def _wait_and_lead(hosts: Hostile) -> Iterator[bytes]:
    yield from hosts.home.drip([b"HTTP/1.1 302 x\r\n", b"Location: /v2/models/net/x\r\n\r\n"], 0.07)


SCENARIOS = [*_led_astray(), *_asked_to_log_in(), *_too_much(), *_too_slow()]
