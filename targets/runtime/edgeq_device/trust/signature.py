"""Check ECDSA signatures over P-256, P-384 and P-521 in plain Python. Only public data are processed, so the running
time need not be constant.

Verification follows SEC 1, version 2.0, section 4.1.4. Points have Jacobian coordinates (X, Y, Z) with x = X / Z² and y
= Y / Z³. Z = 0 is the point at infinity. The formulas are dbl-2001-b and madd of the Explicit-Formulas Database, for
curves y² = x³ - 3x + b.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Dict, List, Mapping, Optional, Tuple

from edgeq_device.errors import BundleError, UsageError
from edgeq_device.system.plainjson import parse_json
from edgeq_device.system.tables import read_table

_Affine = Tuple[int, int]
_Jacobian = Tuple[int, int, int]
_INFINITY = (1, 1, 0)


@dataclass(frozen=True)
class Curve:
    """Describe a curve of FIPS 186-4 with its base point (x, y) of order n.

    Attributes:
        header: first bytes of every public key in DER (SubjectPublicKeyInfo with an uncompressed point).
        digest: hash that Model Signing uses for signatures with this curve.
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
        """Return the number of bytes of a coordinate."""
        return (self.p.bit_length() + 7) // 8


@lru_cache(maxsize=1)
def load_curves() -> Tuple[Curve, ...]:
    """Read the curves from curves.json, next to this file. Its numbers are hexadecimal."""
    table = []
    for row in read_table("trust/curves.json"):
        name, digest, header = (row.pop(key) for key in ("name", "digest", "header"))
        numbers = {key: int(text, 16) for key, text in row.items()}
        table.append(Curve(name=name, header=bytes.fromhex(header), digest=digest, **numbers))
    return tuple(table)


@dataclass(frozen=True)
class PublicKey:
    """Hold a public key, which is a point on a curve."""

    curve: Curve
    x: int
    y: int

    @property
    def der(self) -> bytes:
        """Return the SubjectPublicKeyInfo."""
        size = self.curve.size
        return self.curve.header + self.x.to_bytes(size, "big") + self.y.to_bytes(size, "big")

    @property
    def id(self) -> str:
        """Return the sha256, in hex, of the key's PEM file. Model Signing uses this hash as the name of the key."""
        text = base64.b64encode(self.der).decode("ascii")
        lines = [text[i : i + 64] for i in range(0, len(text), 64)]
        pem = "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""])
        return hashlib.sha256(pem.encode("ascii")).hexdigest()

    def verifies(self, signature: bytes, message: bytes, digest: str = "") -> bool:
        """Return whether `signature` (DER) was made over `message` with the private key that belongs to this key.

        `digest` names a hash that is not longer than the curve's order. The default is the hash that belongs to the
        curve.
        """
        curve, numbers = self.curve, _read_signature(signature)
        # With r = s = 0, every message would be valid (SEC 1, 4.1.4, step 1).
        if numbers is None or not all(0 < number < curve.n for number in numbers):
            return False
        r, s = numbers
        hashed = int.from_bytes(hashlib.new(digest or curve.digest, message).digest(), "big")
        inverse = pow(s, -1, curve.n)
        point = _add_products(curve, hashed * inverse % curve.n, r * inverse % curve.n, (self.x, self.y))
        return point is not None and point[0] % curve.n == r


def read_public_key(der: bytes, context: str) -> PublicKey:
    """Return the key in `der` (SubjectPublicKeyInfo). Messages call the key `context`.

    Raises:
        UsageError: the data are not a key on one of the three curves with an uncompressed point, or the point is not on
            its curve.
    """
    for curve in load_curves():
        size = curve.size
        if der.startswith(curve.header) and len(der) == len(curve.header) + 2 * size:
            x, y = (int.from_bytes(part, "big") for part in (der[-2 * size : -size], der[-size:]))
            # The formulas below hold only for points of the curve.
            if max(x, y) >= curve.p or (y * y - (x * x - 3) * x - curve.b) % curve.p:
                raise UsageError(f"{context}: the public key is not a point of {curve.name}")
            return PublicKey(curve, x, y)
    raise UsageError(
        f"{context}: not an elliptic-curve public key on P-256, P-384 or P-521",
        "Write it with `openssl ec -in KEY.pem -pubout -conv_form uncompressed`",
    )


def _read_signature(der: bytes) -> Optional[Tuple[int, int]]:
    """Return r and s of a signature as positive numbers, or None if they are not encoded in canonical DER."""
    body, trailing = _read_element(der, 0x30)
    r, body = _read_element(body, 0x02)
    s, body = _read_element(body, 0x02)
    if trailing or body or not _is_positive(r) or not _is_positive(s):
        return None
    return int.from_bytes(r, "big"), int.from_bytes(s, "big")


def _is_positive(number: bytes) -> bool:
    """Return whether the content of an integer is above 0 and as short as possible. If longer encodings were valid, the
    same signature could be written in several ways.
    """
    if number[:1] == b"\0":
        return len(number) > 1 and number[1] > 0x7F
    return number[:1] != b"" and number[0] < 0x80


def _read_element(der: bytes, tag: int) -> Tuple[bytes, bytes]:
    """Return the content of the first element, and the bytes that follow the element. Return empty bytes for both if
    the element is malformed or its tag is not `tag`.
    """
    # A signature has less than 256 bytes, so longer forms of a length do not occur.
    long = len(der) > 1 and der[1] == 0x81
    start = 3 if long else 2
    if len(der) < start or der[0] != tag or (der[start - 1] > 0x7F) != long:
        return b"", b""
    end = start + der[start - 1]
    return (der[start:end], der[end:]) if end <= len(der) else (b"", b"")


def _add_products(curve: Curve, base_factor: int, point_factor: int, point: _Affine) -> Optional[_Affine]:
    """Return first · base point + second · point, or None if the sum is the point at infinity.

    Both products are computed at once, bit by bit (Shamir's method).
    """
    p, base = curve.p, (curve.x, curve.y)
    # The index is made of one bit of each factor.
    addends = (None, base, point, _to_affine(_add((*base, 1), point, p), p))
    total: _Jacobian = _INFINITY
    for bit in range(max(base_factor.bit_length(), point_factor.bit_length()) - 1, -1, -1):
        total = _double(total, p)
        addend = addends[(base_factor >> bit & 1) + 2 * (point_factor >> bit & 1)]
        if addend is not None:
            total = _add(total, addend, p)
    return _to_affine(total, p)


def _double(point: _Jacobian, p: int) -> _Jacobian:
    x, y, z = point
    delta, gamma = z * z % p, y * y % p
    beta = x * gamma % p
    alpha = 3 * (x - delta) * (x + delta) % p
    x3 = (alpha * alpha - 8 * beta) % p
    return x3, (alpha * (4 * beta - x3) - 8 * gamma * gamma) % p, 2 * y * z % p


def _add(point: _Jacobian, addend: _Affine, p: int) -> _Jacobian:
    x, y, z = point
    if z == 0:
        return (*addend, 1)
    zz = z * z % p
    h, r = (addend[0] * zz - x) % p, (addend[1] * zz * z - y) % p
    # The points are equal or opposite, where the formula for sums fails.
    if h == 0:
        return _INFINITY if r else _double(point, p)
    hh = h * h % p
    hhh, v = h * hh % p, x * hh % p
    x3 = (r * r - hhh - 2 * v) % p
    return x3, (r * (v - x3) - y * hhh) % p, z * h % p


def _to_affine(point: _Jacobian, p: int) -> Optional[_Affine]:
    x, y, z = point
    if z == 0:
        return None
    inverse = pow(z, -1, p)
    return x * inverse * inverse % p, y * inverse * inverse * inverse % p


SIGNATURE = "model.sig"
"""File name of a bundle's signature, next to its manifest."""
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
# The first release of Model Signing listed each file as a subject of the statement, and wrote no predicate.
_FIRST_PREDICATE_TYPE = "https://model_signing/Digests/v0.1"
SHA256 = re.compile(r"[0-9a-f]{64}")
"""Form of a hash in hex. Such hashes identify bundles and keys."""
# Real chains have two or three certificates.
_MAX_CHAIN = 10
_AGAIN = "Do not use this bundle; get it again from where it was made, or have it signed again"


@dataclass(frozen=True)
class BundleSignature:
    """Hold the content of a signature file, unverified.

    Attributes:
        payload: the statement, as JSON.
        value: the signature over the bytes of `message`, in DER.
        hint: id of the key that made the signature (`PublicKey.id`); "" if the file does not name it.
        chain: certificates in DER, first that of the signing key; empty if the key has no certificate.
    """

    payload: bytes
    value: bytes
    hint: str
    chain: Tuple[bytes, ...]

    @property
    def message(self) -> bytes:
        """Return the bytes that were signed: the payload and its type in the encoding of DSSE."""
        return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(self.payload), self.payload)

    def is_by(self, key: PublicKey) -> bool:
        """Return whether the signature was made with the private key of `key`."""
        if key.verifies(self.value, self.message):
            return True
        # The first release signed Python's repr of the payload, with sha256 on every curve.
        old_message = f"DSSEV1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(self.payload)} {self.payload!r}"
        return _FIRST_PREDICATE_TYPE.encode() in self.payload and key.verifies(
            self.value, old_message.encode(), "sha256"
        )


def parse_signature(data: bytes, context: str) -> BundleSignature:
    """Return the signature in the bytes of a file.

    Raises:
        BundleError: the file is not a signature that Model Signing writes with a key or a certificate.
    """
    bundle = parse_json(data, context)
    if bundle.get("mediaType") != BUNDLE_TYPE:
        raise BundleError(f"{context} is not a Sigstore bundle of version 0.3", _AGAIN)
    envelope, material = (
        _require_object(bundle, "dsseEnvelope", context),
        _require_object(bundle, "verificationMaterial", context),
    )
    if envelope.get("payloadType") != PAYLOAD_TYPE:
        raise BundleError(f"{context}: the payload is not an in-toto statement", _AGAIN)
    signatures = _require_objects(envelope, "signatures", context)
    # With several, it would be unclear which one vouches for the files.
    if len(signatures) != 1:
        raise BundleError(f"{context} contains {len(signatures)} signatures, not one", _AGAIN)
    hint, chain = "", []
    if "publicKey" in material:
        hint = _require_object(material, "publicKey", context).get("hint") or ""
        if not isinstance(hint, str) or (hint and not SHA256.fullmatch(hint)):
            raise BundleError(f"{context}: the hint to the key is not a sha256", _AGAIN)
    elif "x509CertificateChain" in material:
        chain = _require_objects(_require_object(material, "x509CertificateChain", context), "certificates", context)
        if not 0 < len(chain) <= _MAX_CHAIN:
            raise BundleError(f"{context} holds {len(chain)} certificates", _AGAIN)
    else:
        raise BundleError(
            f"{context} was made neither with a key nor with a certificate chain",
            "Verify a keyless signature with the model-signing package, on a machine with a network",
        )
    return BundleSignature(
        payload=_decode(envelope, "payload", context),
        value=_decode(signatures[0], "sig", context),
        hint=hint,
        chain=tuple(_decode(certificate, "rawBytes", context) for certificate in chain),
    )


def read_signed_files(payload: bytes, context: str) -> Dict[str, str]:
    """Return the sha256 in hex of every file in the statement `payload`, keyed by relative path.

    Raises:
        BundleError: the payload is not a statement of Model Signing that lists whole files by their sha256.
    """
    context = f"{context}: statement"
    statement = parse_json(payload, context)
    if statement.get("_type") != STATEMENT_TYPE:
        raise BundleError(f"{context} is not an in-toto statement of version 1", _AGAIN)
    subjects, kind = _require_objects(statement, "subject", context), statement.get("predicateType")
    if kind == _FIRST_PREDICATE_TYPE:
        return _read_digests(
            [{**_require_object(s, "digest", context), "name": s.get("name")} for s in subjects], "sha256", context
        )
    if kind != PREDICATE_TYPE:
        raise BundleError(f"{context} is not about a model's files", _AGAIN)
    predicate = _require_object(statement, "predicate", context)
    serialization = _require_object(predicate, "serialization", context)
    if (serialization.get("method"), serialization.get("hash_type")) != ("files", "sha256"):
        raise BundleError(f"{context} does not name whole files by their sha256", "Sign the bundle in that way")
    resources = _require_objects(predicate, "resources", context)
    if any(resource.get("algorithm") != "sha256" for resource in resources):
        raise BundleError(f"{context} does not name whole files by their sha256", "Sign the bundle in that way")
    files = _read_digests(resources, "digest", context)
    # The digest repeats what the list says; a difference shows an edited list.
    if len(subjects) != 1 or _require_object(subjects[0], "digest", context).get("sha256") != hash_digests(files):
        raise BundleError(f"{context}: its digest of the whole does not match its files", _AGAIN)
    return files


def hash_digests(files: Mapping[str, str]) -> str:
    """Concatenate the sha256 digests of the files as bytes, in the order of `files`, and return the sha256 of the
    result in hex.
    """
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in files.values())).hexdigest()


def check_files(signed: Mapping[str, str], actual: Mapping[str, str], context: str) -> None:
    """Check that the mappings `actual` and `signed` are identical. Each maps relative paths to SHA-256 hashes in hex.

    Raises:
        BundleError: a file is missing, was changed, or was not signed.
    """
    # In both directions: a missing file is as wrong as a file that nobody signed.
    for name in sorted({**signed, **actual}):
        if signed.get(name) != actual.get(name):
            problem = "is not signed" if name not in signed else "is missing" if name not in actual else "was changed"
            raise BundleError(f"{context}: {name!a} {problem}, according to its signature", _AGAIN)


def _read_digests(entries: List[Dict[str, Any]], key: str, context: str) -> Dict[str, str]:
    files: Dict[str, str] = {}
    for entry in entries:
        name, digest = entry.get("name"), entry.get(key)
        if not isinstance(name, str) or name in files or not isinstance(digest, str) or not SHA256.fullmatch(digest):
            raise BundleError(f"{context}: {name!a} is not a file with a sha256, or occurs twice", _AGAIN)
        files[name] = digest
    if not files:
        raise BundleError(f"{context} names no file", _AGAIN)
    return files


def _require_object(values: Mapping[str, Any], key: str, context: str) -> Dict[str, Any]:
    value = values.get(key)
    if not isinstance(value, dict):
        raise BundleError(f"{context}: {key} is missing or not an object", _AGAIN)
    return value


def _require_objects(values: Mapping[str, Any], key: str, context: str) -> List[Dict[str, Any]]:
    items = values.get(key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BundleError(f"{context}: {key} is missing or not a list of objects", _AGAIN)
    return items


def decode_base64(text: object) -> bytes:
    """Return the bytes that `text` encodes.

    Raises:
        ValueError: `text` is not the canonical base64 encoding of its bytes.
    """
    data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    if base64.b64encode(data).decode("ascii") != text or not data:
        raise ValueError("not base64")
    return data


def _decode(values: Mapping[str, Any], key: str, context: str) -> bytes:
    try:
        return decode_base64(values.get(key))
    except ValueError as error:
        raise BundleError(f"{context}: {key} is not base64", _AGAIN) from error
