"""ECDSA signatures checked in plain Python, over P-256, P-384 and P-521. Nothing here is secret, so time may vary.

Verification is that of SEC 1, version 2.0, section 4.1.4. Points are in Jacobian coordinates (X, Y, Z) with
x = X / Z², y = Y / Z³; Z = 0 is the point at infinity. The formulas are dbl-2001-b and madd of the Explicit-Formulas
Database, for curves y² = x³ - 3x + b.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from typing import Optional, Tuple

from edgeq_device.errors import UsageError

_Affine = Tuple[int, int]
_Jacobian = Tuple[int, int, int]
_INFINITY = (1, 1, 0)


@dataclass(frozen=True)
class Curve:
    """A curve of FIPS 186-4 with its base point (x, y) of order n.

    Attributes:
        header: what a public key in DER (SubjectPublicKeyInfo, the point uncompressed) begins with.
        digest: the hash that signatures with it are made of, as Model Signing has it.
    """

    name: str
    p: int
    b: int
    n: int
    x: int
    y: int
    header: bytes
    digest: str

    @property
    def size(self) -> int:
        """Bytes of a coordinate."""
        return (self.p.bit_length() + 7) // 8


CURVES = (
    Curve(
        "P-256",
        2**256 - 2**224 + 2**192 + 2**96 - 1,
        0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B,
        0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551,
        0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
        0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
        bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004"),
        "sha256",
    ),
    Curve(
        "P-384",
        2**384 - 2**128 - 2**96 + 2**32 - 1,
        0xB3312FA7E23EE7E4988E056BE3F82D19181D9C6EFE8141120314088F5013875AC656398D8A2ED19D2A85C8EDD3EC2AEF,
        0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFC7634D81F4372DDF581A0DB248B0A77AECEC196ACCC52973,
        0xAA87CA22BE8B05378EB1C71EF320AD746E1D3B628BA79B9859F741E082542A385502F25DBF55296C3A545E3872760AB7,
        0x3617DE4A96262C6F5D9E98BF9292DC29F8F41DBD289A147CE9DA3113B5F0B8C00A60B1CE1D7E819D7A431D7C90EA0E5F,
        bytes.fromhex("3076301006072a8648ce3d020106052b8104002203620004"),
        "sha384",
    ),
    Curve(
        "P-521",
        2**521 - 1,
        0x51953EB9618E1C9A1F929A21A0B68540EEA2DA725B99B315F3B8B489918EF109E156193951EC7E937B1652C0BD3BB1BF073573DF883D2C34F1EF451FD46B503F00,
        0x1FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFA51868783BF2F966B7FCC0148F709A5D03BB5C9B8899C47AEBB6FB71E91386409,
        0xC6858E06B70404E9CD9E3ECB662395B4429C648139053FB521F828AF606B4D3DBAA14B5E77EFE75928FE1DC127A2FFA8DE3348B3C1856A429BF97E7E31C2E5BD66,
        0x11839296A789A3BC0045C8A5FB42C7D1BD998F54449579B446817AFBD17273E662C97EE72995EF42640C550B9013FAD0761353C7086A272C24088BE94769FD16650,
        bytes.fromhex("30819b301006072a8648ce3d020106052b810400230381860004"),
        "sha512",
    ),
)


@dataclass(frozen=True)
class PublicKey:
    """A point of a curve that signatures are checked with."""

    curve: Curve
    x: int
    y: int

    @property
    def der(self) -> bytes:
        """SubjectPublicKeyInfo."""
        size = self.curve.size
        return self.curve.header + self.x.to_bytes(size, "big") + self.y.to_bytes(size, "big")

    @property
    def id(self) -> str:
        """sha256 of the key as a PEM file, in hex: what Model Signing names a key by."""
        text = base64.b64encode(self.der).decode("ascii")
        lines = [text[i : i + 64] for i in range(0, len(text), 64)]
        pem = "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])
        return hashlib.sha256(pem.encode("ascii")).hexdigest()

    def verifies(self, signature: bytes, message: bytes, digest: str = "") -> bool:
        """Whether `signature` (DER) was made over `message` with the private key of this one.

        `digest` is a hash no longer than the curve's order, the curve's own where it is not given.
        """
        curve, numbers = self.curve, _read_signature(signature)
        if numbers is None or not all(0 < number < curve.n for number in numbers):
            return False
        r, s = numbers
        hashed = int.from_bytes(hashlib.new(digest or curve.digest, message).digest(), "big")
        inverse = pow(s, -1, curve.n)
        found = _sum_of_products(curve, hashed * inverse % curve.n, r * inverse % curve.n, (self.x, self.y))
        return found is not None and found[0] % curve.n == r


def read_public_key(der: bytes, where: str) -> PublicKey:
    """The key in `der` (SubjectPublicKeyInfo); `where` names it in messages.

    Raises:
        UsageError: not a key on one of the three curves with its point written in full, or not a point of its curve.
    """
    for curve in CURVES:
        size = curve.size
        if der.startswith(curve.header) and len(der) == len(curve.header) + 2 * size:
            x, y = (int.from_bytes(part, "big") for part in (der[-2 * size : -size], der[-size:]))
            if max(x, y) >= curve.p or (y * y - (x * x - 3) * x - curve.b) % curve.p:
                raise UsageError(f"{where}: the public key is not a point of {curve.name}")
            return PublicKey(curve, x, y)
    raise UsageError(
        f"{where}: not an elliptic-curve public key on P-256, P-384 or P-521",
        "Write it with `openssl ec -in KEY.pem -pubout -conv_form uncompressed`",
    )


def _read_signature(der: bytes) -> Optional[Tuple[int, int]]:
    """Return r and s of a signature; None where it is not their one spelling in DER, as positive numbers."""
    body, rest = _element(der, 0x30)
    r, body = _element(body, 0x02)
    s, body = _element(body, 0x02)
    if rest or body or not _is_positive(r) or not _is_positive(s):
        return None
    return int.from_bytes(r, "big"), int.from_bytes(s, "big")


def _is_positive(number: bytes) -> bool:
    """Return whether the content of an integer is above 0 and as short as it can be: another spelling of a signature
    would be another signature of the same bytes."""
    if number[:1] == b"\0":
        return len(number) > 1 and number[1] > 0x7F
    return number[:1] != b"" and number[0] < 0x80


def _element(der: bytes, tag: int) -> Tuple[bytes, bytes]:
    """The content of the first element, and what follows it; nothing where it is no element of `tag`."""
    long = len(der) > 1 and der[1] == 0x81
    start = 3 if long else 2
    if len(der) < start or der[0] != tag or (der[start - 1] > 0x7F) != long:
        return b"", b""
    end = start + der[start - 1]
    return (der[start:end], der[end:]) if end <= len(der) else (b"", b"")


def _sum_of_products(curve: Curve, first: int, second: int, point: _Affine) -> Optional[_Affine]:
    """first · base point + second · point; None where that is the point at infinity.

    Both products at once, bit by bit (Shamir's method)."""
    p, base = curve.p, (curve.x, curve.y)
    addends = (None, base, point, _affine(_add((*base, 1), point, p), p))
    total: _Jacobian = _INFINITY
    for bit in range(max(first.bit_length(), second.bit_length()) - 1, -1, -1):
        total = _double(total, p)
        addend = addends[(first >> bit & 1) + 2 * (second >> bit & 1)]
        if addend is not None:
            total = _add(total, addend, p)
    return _affine(total, p)


def _double(point: _Jacobian, p: int) -> _Jacobian:
    x, y, z = point
    delta, gamma = z * z % p, y * y % p
    beta = x * gamma % p
    alpha = 3 * (x - delta) * (x + delta) % p
    x3 = (alpha * alpha - 8 * beta) % p
    return x3, (alpha * (4 * beta - x3) - 8 * gamma * gamma) % p, 2 * y * z % p


def _add(point: _Jacobian, other: _Affine, p: int) -> _Jacobian:
    x, y, z = point
    if z == 0:
        return (*other, 1)
    zz = z * z % p
    h, r = (other[0] * zz - x) % p, (other[1] * zz * z - y) % p
    if h == 0:
        return _INFINITY if r else _double(point, p)
    hh = h * h % p
    hhh, v = h * hh % p, x * hh % p
    x3 = (r * r - hhh - 2 * v) % p
    return x3, (r * (v - x3) - y * hhh) % p, z * h % p


def _affine(point: _Jacobian, p: int) -> Optional[_Affine]:
    x, y, z = point
    if z == 0:
        return None
    inverse = pow(z, -1, p)
    return x * inverse * inverse % p, y * inverse * inverse * inverse % p
