"""Signature files are untrusted: each is read or refused in one line, whatever it contains."""

from __future__ import annotations

import copy
import json
from contextlib import suppress
from typing import Any

import pytest
from edgeq_device.errors import BundleError
from edgeq_device.trust.signature import (
    BUNDLE_TYPE,
    PAYLOAD_TYPE,
    check_files,
    parse_signature,
    root_digest,
    signed_files,
)
from hypothesis import given, settings
from hypothesis import strategies as st

FILES = {"a/b": "1" * 64, "c": "2" * 64}
STATEMENT: dict[str, Any] = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [{"name": "m", "digest": {"sha256": root_digest(FILES)}}],
    "predicateType": "https://model_signing/signature/v1.0",
    "predicate": {
        "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
        "resources": [{"name": n, "digest": d, "algorithm": "sha256"} for n, d in FILES.items()],
    },
}
BUNDLE: dict[str, Any] = {
    "mediaType": BUNDLE_TYPE,
    "verificationMaterial": {"publicKey": {"hint": "a" * 64}},
    "dsseEnvelope": {"payload": "e30=", "payloadType": PAYLOAD_TYPE, "signatures": [{"sig": "AA==", "keyid": None}]},
}
CHAIN = {**BUNDLE, "verificationMaterial": {"x509CertificateChain": {"certificates": [{"rawBytes": "AA=="}]}}}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.just([None]),
    st.just([{}, {}]),
    st.just("f" * 64),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in items for found in [(*path, key), *places(inner, (*path, key))]]


def changed(value: dict[str, Any], data: st.DataObject) -> bytes:
    value = copy.deepcopy(value)
    *path, last = data.draw(st.sampled_from(places(value)))
    target: Any = value
    for key in path:
        target = target[key]
    if isinstance(target, dict) and data.draw(st.booleans()):
        del target[last]
    else:
        target[last] = data.draw(VALUES)
    return json.dumps(value).encode()


def test_reads_complete_signatures() -> None:
    found = parse_signature(json.dumps(BUNDLE).encode(), "x")
    assert (found.payload, found.value, found.hint, found.chain) == (b"{}", b"\0", "a" * 64, ())
    assert found.message == b"DSSEv1 28 application/vnd.in-toto+json 2 {}"
    assert parse_signature(json.dumps(CHAIN).encode(), "x").chain == (b"\0",)
    assert signed_files(json.dumps(STATEMENT).encode(), "x") == FILES


@settings(max_examples=60)
@given(st.data(), st.sampled_from([BUNDLE, CHAIN]))
def test_changed_bundles(data: st.DataObject, bundle: dict[str, Any]) -> None:
    text = changed(bundle, data)
    with suppress(BundleError):
        parse_signature(text, "x")


@settings(max_examples=60)
@given(st.data())
def test_changed_statements(data: st.DataObject) -> None:
    """A changed statement is refused, or its digests are unchanged. The digest of the whole covers the files' digests.
    Only the signature covers their names.
    """
    text = changed(STATEMENT, data)
    with suppress(BundleError):
        assert list(signed_files(text, "x").values()) == list(FILES.values())


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ({**FILES, "d": "3" * 64}, "'d' is not signed"),
        ({"c": "2" * 64}, "'a/b' is missing"),
        ({**FILES, "c": "3" * 64}, "'c' was changed"),
    ],
)
def test_files_that_differ(found: dict[str, str], problem: str) -> None:
    with pytest.raises(BundleError, match=problem):
        check_files(FILES, found, "x")
    check_files(FILES, dict(FILES), "x")


def test_other_serializations_are_refused() -> None:
    for key, value in (("method", "shards"), ("hash_type", "blake2")):
        other = copy.deepcopy(STATEMENT)
        other["predicate"]["serialization"][key] = value
        with pytest.raises(BundleError, match="whole files"):
            signed_files(json.dumps(other).encode(), "x")
    with pytest.raises(BundleError, match="keyless"):
        parse_signature(json.dumps({**BUNDLE, "verificationMaterial": {"certificate": {}}}).encode(), "x")
    # Only one of the encodings of b"x" is canonical base64.
    for text in ("eA==?", "eB==", "eA=", "eA", "eA==\n", "", 1234, None):
        broken = {**BUNDLE["dsseEnvelope"], "payload": text}
        with pytest.raises(BundleError, match="not base64"):
            parse_signature(json.dumps({**BUNDLE, "dsseEnvelope": broken}).encode(), "x")
