"""Test the verification of signatures over P-256, P-384 and P-521 in plain Python."""

from __future__ import annotations

import pytest
from edgeq_device.errors import UsageError
from edgeq_device.trust.signature import Curve, PublicKey, load_curves, read_public_key
from hypothesis import given, settings
from hypothesis import strategies as st


def der(r: int, s: int) -> bytes:
    """Encode an ECDSA signature as DER."""

    def element(tag: int, body: bytes) -> bytes:
        return bytes([tag, *([0x81] if len(body) > 127 else []), len(body)]) + body

    numbers = [n.to_bytes(n.bit_length() // 8 + 1, "big", signed=True) for n in (r, s)]
    return element(0x30, b"".join(element(0x02, number) for number in numbers))


# RFC 6979, appendix A.2.5: P-256, SHA-256, message "sample".
RFC_KEY = PublicKey(
    load_curves()[0],
    0x60FED4BA255A9D31C961EB74C6356D68C049B8923B61FA6CE669622E60F29FB6,
    0x7903FE1008B8BC99A41AE9E95628BC64F2F1B20C2D7E9F5177A3C294D4462299,
)
RFC_R = 0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716
RFC_S = 0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8


def test_the_example_of_the_rfc() -> None:
    assert RFC_KEY.verifies(der(RFC_R, RFC_S), b"sample")
    assert not RFC_KEY.verifies(der(RFC_R, RFC_S), b"sampl")
    assert read_public_key(RFC_KEY.der, "x") == RFC_KEY


N = load_curves()[0].n


@pytest.mark.parametrize(
    ("r", "s"),
    [(0, RFC_S), (RFC_R, 0), (0, 0), (N, RFC_S), (RFC_R, N), (RFC_R + N, RFC_S), (RFC_R, RFC_S + N), (-RFC_R, RFC_S)],
)
def test_numbers_out_of_range_are_refused(r: int, s: int) -> None:
    assert not RFC_KEY.verifies(der(r, s), b"sample")


def spelled(r: bytes, s: bytes, *, head: bytes = b"", tail: bytes = b"") -> bytes:
    """Encode a signature from the bytes of its two integers. `head` replaces the tag and the length of the whole."""
    body = b"".join(bytes([0x02, len(number)]) + number for number in (r, s)) + tail
    return (head or bytes([0x30, len(body)])) + body


def test_one_signature_has_one_spelling() -> None:
    """Only one encoding of a signature is valid. Another encoding would be a new signature of the same bytes, which is
    not in a list of known signatures.
    """
    r, s = (number.to_bytes(33, "big") for number in (RFC_R, RFC_S))
    good = spelled(r, s)
    assert RFC_KEY.verifies(good, b"sample")
    body = good[2:]
    others = [
        spelled(b"\0" + r, s),
        spelled(r, b"\0\0" + s),
        spelled(r[1:], s),  # negative
        spelled(b"", s),
        spelled(r, s, tail=b"\0"),
        spelled(r, s, tail=b"\x05\0"),
        spelled(r, s, head=bytes([0x30, 0x81, len(body)])),
        spelled(r, s, head=bytes([0x30, 0x82, 0, len(body)])),
        b"\x30\x80" + body + b"\0\0",
        bytes([0x30, len(body) + 1, 0x02, 0x81, 33]) + body[2:],
        bytes([0x31]) + good[1:],
        good + b"\0",
    ]
    assert not any(RFC_KEY.verifies(other, b"sample") for other in others)
    # Small numbers have a leading zero only if the next bit is set.
    assert der(1, 0x80) == spelled(b"\1", b"\0\x80")


@pytest.mark.parametrize("length", range(71))
def test_a_cut_signature_is_refused(length: int) -> None:
    assert not RFC_KEY.verifies(der(RFC_R, RFC_S)[:length], b"sample")


@settings(max_examples=60)
@given(st.binary(max_size=80))
def test_no_bytes_are_a_signature_by_chance(data: bytes) -> None:
    assert not RFC_KEY.verifies(data, b"sample")
    assert not RFC_KEY.verifies(der(RFC_R, RFC_S) + data + b"x", b"sample")


@pytest.mark.parametrize("curve", load_curves(), ids=lambda curve: curve.name)
def test_points_that_are_none_are_refused(curve: Curve) -> None:
    base = PublicKey(curve, curve.x, curve.y)
    assert read_public_key(base.der, "x") == base
    for x, y in ((curve.x, curve.y + 1), (0, 0), (curve.x + 1, curve.y)):
        with pytest.raises(UsageError, match="not a point"):
            read_public_key(PublicKey(curve, x, y).der, "x")
    compressed = curve.header[:-1] + b"\x02" + base.der[len(curve.header) : len(curve.header) + curve.size]
    for data in (b"", base.der[:-1], base.der + b"\0", compressed):
        with pytest.raises(UsageError, match="not an elliptic-curve public key"):
            read_public_key(data, "x")


@pytest.mark.parametrize("curve", load_curves(), ids=lambda curve: curve.name)
@pytest.mark.parametrize("sign", [1, -1], ids=["base point", "its inverse"])
def test_keys_whose_sum_with_the_base_point_is_special(curve: Curve, sign: int) -> None:
    """An addition that has to double, and the point at infinity in the table, are right. Private key ±1, nonce 1: r =
    x.
    """
    key = PublicKey(curve, curve.x, curve.y * sign % curve.p)
    import hashlib

    digest = int.from_bytes(hashlib.new(curve.digest, b"m").digest(), "big")
    r = curve.x % curve.n
    assert key.verifies(der(r, (digest + sign * r) % curve.n), b"m")
    assert not key.verifies(der(r, (digest - sign * r) % curve.n), b"m")


@pytest.mark.parametrize("curve", load_curves(), ids=lambda curve: curve.name)
def test_it_agrees_with_cryptography(curve: Curve) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    kind = {"P-256": ec.SECP256R1, "P-384": ec.SECP384R1, "P-521": ec.SECP521R1}[curve.name]
    digest = ec.ECDSA(getattr(hashes, curve.digest.upper())())
    for number in range(3):
        private = ec.generate_private_key(kind())
        key = read_public_key(private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo), "x")
        message = b"%d" % number
        signature = private.sign(message, digest)
        assert key.verifies(signature, message)
        r, s = decode_dss_signature(signature)
        assert der(r, s) == signature
        assert not key.verifies(der(r, s ^ 1), message)
        assert not key.verifies(der(r ^ 1, s), message)
        assert not key.verifies(signature, message + b"x")
