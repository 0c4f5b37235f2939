"""Test which host gets a login: docker's file, challenges and addresses are read strictly."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from edgeq_device.trust.connection import Address, parse_address, parse_challenges, read_credentials
from hypothesis import given
from hypothesis import strategies as st

HOST = "registry.example.com"
LOGIN = base64.b64encode(b"me:secret").decode()


def write(folder: Path, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("key", "host", "found"),
    [
        (HOST, HOST, LOGIN),
        (f"{HOST}:5000", f"{HOST}:5000", LOGIN),
        ("[::1]:5000", "[::1]:5000", LOGIN),
        (HOST, f"{HOST}:5000", ""),
        (f"{HOST}:5000", HOST, ""),
        (HOST, f"{HOST}:443", ""),
        (HOST, f"{HOST}.", ""),
        (HOST, f"evil-{HOST}", ""),
        (HOST, f"{HOST}.evil.example", ""),
        (HOST, "com", ""),
        (f"https://{HOST}/v1/", HOST, ""),
        (f"*.{HOST}", f"a.{HOST}", ""),
        ("", HOST, ""),
    ],
)
def test_logins_are_for_exactly_one_host(
    key: str, host: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    write(tmp_path, {"auths": {key: {"auth": LOGIN}}, "credsStore": "evil", "credHelpers": {host: "evil"}})
    assert read_credentials(host) == found


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"auths": []},
        {"auths": {HOST: None}},
        {"auths": {HOST: {"auth": 5}}},
        {"auths": {HOST: {"auth": "é"}}},
        {"auths": {HOST: {}}},
    ],
)
def test_a_file_without_a_login(value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert read_credentials(HOST) == ""
    write(tmp_path, value)
    assert read_credentials(HOST) == ""


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([], []),
        (['Basic realm="x"'], [("basic", {"realm": "x"})]),
        (['Bearer realm="a,\\"c", service=s , Basic'], [("bearer", {"realm": 'a,"c', "service": "s"}), ("basic", {})]),
        (["Negotiate abc==", 'BEARER Scope = "a b"'], [("negotiate", {"abc": "="}), ("bearer", {"scope": "a b"})]),
        (['Bearer realm="a", realm="b"'], [("bearer", {"realm": "a"})]),
        (["realm=x"], []),
        (["Bearer " + "a" * 100_000], [("bearer", {}), ("a" * 8185, {})]),
    ],
)  # fmt: skip
def test_challenges(headers: list[str], found: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges(headers) == found


@given(st.lists(st.text(st.characters(codec="latin-1")), max_size=3))
def test_any_challenge_is_read(headers: list[str]) -> None:
    for scheme, values in parse_challenges(headers):
        assert scheme == scheme.lower()
        assert all(values.values())


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://Registry.Example.com", ("https", HOST, 443)),
        ("HTTPS://registry.example.com:443/x", ("https", HOST, 443)),
        ("https://registry.example.com:5000?x", ("https", HOST, 5000)),
        ("http://[::1]:5000/", ("http", "::1", 5000)),
        ("https://xn--bcher-kva.example/", ("https", "xn--bcher-kva.example", 443)),
    ],
)
def test_origins(text: str, origin: tuple[str, str, int]) -> None:
    assert parse_address(text).origin == origin


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("127.1", False),
        ("0.0.0.0", False),
        ("127.999.0.1", False),
        ("0x7f000001", False),
        ("[::2]", False),
    ],
)
def test_this_machine(host: str, local: bool) -> None:
    assert parse_address(f"https://{host}/").local is local


_PIECES = st.sampled_from(
    ["https://", "http://", "//", "/", "\\", "@", ":", "?", "#", "[", "]", "::1", "a.example", "b.example", "443", "é",
     " ", "\t", "%40", ".", "x", "\u2100", "file:", ";"]
)  # fmt: skip


@given(st.lists(_PIECES, max_size=8).map("".join))
def test_an_address_has_one_reading(text: str) -> None:
    """An address is refused if urllib and this parser could disagree about its host."""
    home = parse_address("https://registry.example.com/v2/x/")
    for read in (parse_address, home.join):
        found = _read(read, text)
        if found is not None:
            again = urlsplit(f"{found.scheme}://{found.place}{found.target}")
            assert (again.scheme, again.hostname, again.port) == found.origin
            assert again.username is None
            assert read is not parse_address or urlsplit(text).hostname == found.host


def _read(read: Callable[[str], Address], text: str) -> Address | None:
    try:
        return read(text)
    except ValueError as error:
        if str(error) not in ("not a valid address", "it leads away from https"):
            raise
        return None
