"""A signature file of OpenSSF Model Signing 1.0, read: an in-toto statement of all files in a DSSE envelope, in a
Sigstore bundle. What it says counts only once a trusted key has verified it (`edgeq_device.trust`)."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

from edgeq_device.ecdsa import PublicKey
from edgeq_device.errors import BundleError
from edgeq_device.plainjson import parse_json

SIGNATURE = "model.sig"
"""The name of a bundle's signature, beside its manifest."""
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
# What the first release of Model Signing wrote: each file is a subject, and there is no predicate.
_FIRST_PREDICATE_TYPE = "https://model_signing/Digests/v0.1"
SHA256 = re.compile(r"[0-9a-f]{64}")
"""A hash in hex, as bundles and keys are named by."""
_MAX_CHAIN = 10
_AGAIN = "Do not use this bundle; get it again from where it was made, or have it signed again"


@dataclass(frozen=True)
class Signature:
    """What a signature file holds, unverified.

    Attributes:
        payload: the statement, JSON.
        value: the signature over the bytes that `message` gives, DER.
        hint: the id of the key that made it (`PublicKey.id`), "" where it names none.
        chain: certificates in DER, that of the signing key first; empty where it was made with a bare key.
    """

    payload: bytes
    value: bytes
    hint: str
    chain: Tuple[bytes, ...]

    @property
    def message(self) -> bytes:
        """The bytes that were signed: DSSE's encoding of type and payload."""
        return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(self.payload), self.payload)

    def is_by(self, key: PublicKey) -> bool:
        """Whether it was made with the private key of `key`."""
        if key.verifies(self.value, self.message):
            return True
        # The first release signed Python's way to write the payload, by its sha256 on every curve.
        first = f"DSSEV1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(self.payload)} {self.payload!r}"
        return _FIRST_PREDICATE_TYPE.encode() in self.payload and key.verifies(self.value, first.encode(), "sha256")


def parse_signature(data: bytes, where: str) -> Signature:
    """The signature in the bytes of a file.

    Raises:
        BundleError: it is not one that Model Signing writes with a key or a certificate.
    """
    bundle = parse_json(data, where)
    if bundle.get("mediaType") != BUNDLE_TYPE:
        raise BundleError(f"{where} is no Sigstore bundle of version 0.3", _AGAIN)
    envelope, material = _object(bundle, "dsseEnvelope", where), _object(bundle, "verificationMaterial", where)
    if envelope.get("payloadType") != PAYLOAD_TYPE:
        raise BundleError(f"{where}: the payload is not an in-toto statement", _AGAIN)
    signatures = _objects(envelope, "signatures", where)
    if len(signatures) != 1:
        raise BundleError(f"{where} holds {len(signatures)} signatures, not one", _AGAIN)
    hint, chain = "", []
    if "publicKey" in material:
        hint = _object(material, "publicKey", where).get("hint") or ""
        if not isinstance(hint, str) or (hint and not SHA256.fullmatch(hint)):
            raise BundleError(f"{where}: the hint at the key is not a sha256", _AGAIN)
    elif "x509CertificateChain" in material:
        chain = _objects(_object(material, "x509CertificateChain", where), "certificates", where)
        if not 0 < len(chain) <= _MAX_CHAIN:
            raise BundleError(f"{where} holds {len(chain)} certificates", _AGAIN)
    else:
        raise BundleError(
            f"{where} was made neither with a key nor with a certificate chain",
            "Verify a keyless signature with the model-signing package, where there is a network",
        )
    return Signature(
        payload=_decoded(envelope, "payload", where),
        value=_decoded(signatures[0], "sig", where),
        hint=hint,
        chain=tuple(_decoded(certificate, "rawBytes", where) for certificate in chain),
    )


def signed_files(payload: bytes, where: str) -> Dict[str, str]:
    """Relative path → sha256 in hex of every file that the statement `payload` names.

    Raises:
        BundleError: it is not a statement of Model Signing by whole files in sha256.
    """
    where = f"{where}: statement"
    statement = parse_json(payload, where)
    if statement.get("_type") != STATEMENT_TYPE:
        raise BundleError(f"{where} is not of in-toto's version 1", _AGAIN)
    subjects, kind = _objects(statement, "subject", where), statement.get("predicateType")
    if kind == _FIRST_PREDICATE_TYPE:
        return _digests([{**_object(s, "digest", where), "name": s.get("name")} for s in subjects], "sha256", where)
    if kind != PREDICATE_TYPE:
        raise BundleError(f"{where} is not about a model's files", _AGAIN)
    predicate = _object(statement, "predicate", where)
    serialization = _object(predicate, "serialization", where)
    if (serialization.get("method"), serialization.get("hash_type")) != ("files", "sha256"):
        raise BundleError(f"{where} does not name whole files by their sha256", "Sign the bundle in that way")
    resources = _objects(predicate, "resources", where)
    if any(resource.get("algorithm") != "sha256" for resource in resources):
        raise BundleError(f"{where} does not name whole files by their sha256", "Sign the bundle in that way")
    files = _digests(resources, "digest", where)
    if len(subjects) != 1 or _object(subjects[0], "digest", where).get("sha256") != root_digest(files):
        raise BundleError(f"{where}: its digest of the whole is not that of its files", _AGAIN)
    return files


def root_digest(files: Mapping[str, str]) -> str:
    """sha256 in hex of the files' sha256 (bytes) one after the other, in the order of `files`."""
    return hashlib.sha256(b"".join(bytes.fromhex(digest) for digest in files.values())).hexdigest()


def check_files(signed: Mapping[str, str], found: Mapping[str, str], where: str) -> None:
    """Hold what is there (`found`: relative path → sha256 in hex) against what was signed: the same files.

    Raises:
        BundleError: a file is missing, was changed, or was not signed.
    """
    for name in sorted({**signed, **found}):
        if signed.get(name) != found.get(name):
            problem = "is not signed" if name not in signed else "is missing" if name not in found else "was changed"
            raise BundleError(f"{where}: {name!a} {problem}, by its signature", _AGAIN)


def _digests(entries: List[Dict[str, Any]], key: str, where: str) -> Dict[str, str]:
    files: Dict[str, str] = {}
    for entry in entries:
        name, digest = entry.get("name"), entry.get(key)
        if not isinstance(name, str) or name in files or not isinstance(digest, str) or not SHA256.fullmatch(digest):
            raise BundleError(f"{where}: {name!a} is no file with a sha256, or is there twice", _AGAIN)
        files[name] = digest
    if not files:
        raise BundleError(f"{where} names no file", _AGAIN)
    return files


def _object(values: Mapping[str, Any], key: str, where: str) -> Dict[str, Any]:
    found = values.get(key)
    if not isinstance(found, dict):
        raise BundleError(f"{where}: {key} is missing or not an object", _AGAIN)
    return found


def _objects(values: Mapping[str, Any], key: str, where: str) -> List[Dict[str, Any]]:
    found = values.get(key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise BundleError(f"{where}: {key} is missing or not a list of objects", _AGAIN)
    return found


def decode_base64(text: object) -> bytes:
    """Return what `text` encodes.

    Raises:
        ValueError: it is not the one spelling that its bytes have in base64.
    """
    data = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    if base64.b64encode(data).decode("ascii") != text or not data:
        raise ValueError("not base64")
    return data


def _decoded(values: Mapping[str, Any], key: str, where: str) -> bytes:
    try:
        return decode_base64(values.get(key))
    except ValueError as error:
        raise BundleError(f"{where}: {key} is not base64", _AGAIN) from error
