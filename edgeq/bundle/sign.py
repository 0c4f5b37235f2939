"""A signature file of OpenSSF Model Signing 1.0, made: the same key and files give the same bytes."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from edgeq_device.manifest import MANIFEST
from edgeq_device.signature import (
    BUNDLE_TYPE,
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    SIGNATURE,
    STATEMENT_TYPE,
    PublicKey,
    Signature,
    read_public_key,
    root_digest,
)

from edgeq.bundle.verify import check_cryptography, contents, opened, verified_key
from edgeq.bundle.write import is_signature, write_archive
from edgeq.errors import BundleError, DataError, OutputError, UsageError
from edgeq.model.load import path_of
from edgeq.util.display import Displayed
from edgeq.util.outputs import output_file
from edgeq.util.resources import device_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

PASSWORD = "EDGEQ_KEY_PASSWORD"


@dataclass(frozen=True)
class SigningKey:
    """A private key, its public one, and the certificates (DER, the key's own first) that vouch for it, if any."""

    private: EllipticCurvePrivateKey
    public: PublicKey
    chain: tuple[bytes, ...] = ()


def read_signing_key(path: Path, certificates: Sequence[Path] = ()) -> SigningKey:
    """The private key in a PEM file; $EDGEQ_KEY_PASSWORD opens an encrypted one.

    Args:
        certificates: PEM files: the key's own certificate first, then those of its issuers. The root may be left out.

    Raises:
        DataError: it cannot be read, or is no elliptic-curve key on P-256, P-384 or P-521.
        UsageError: the password is missing or wrong, or the first certificate is another key's.
        RuntimeUnavailableError: cryptography is not installed.
    """
    check_cryptography()
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    password = os.environ.get(PASSWORD)
    try:
        data = path.read_bytes()
        private = load_pem_private_key(data, password.encode() if password and b"ENCRYPTED" in data else None)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "Name a private key") from error
    except TypeError as error:
        raise UsageError(f"{path} is encrypted", f"Set {PASSWORD}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is no private key in PEM, or its password is another", _how()) from error
    if not isinstance(private, EllipticCurvePrivateKey):
        raise DataError(f"{path} is no elliptic-curve key", _how())
    with device_errors():
        spki = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        public = read_public_key(spki, str(path))
    chain: list[bytes] = []
    for file in certificates:
        try:
            found = x509.load_pem_x509_certificates(file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{file} holds no certificate in PEM that can be read") from error
        if not chain and found[0].public_key() != private.public_key():
            raise UsageError(f"{file} is not the certificate of {path}", "Name the key's own certificate first")
        chain += [certificate.public_bytes(Encoding.DER) for certificate in found]
    if chain:
        # Refused here, and not only by everyone who verifies: an expired certificate, one that is not for signing.
        try:
            verified_key(chain, chain[-1:])
        except BundleError as error:
            raise UsageError(f"{certificates[0]}: {error.problem}", "Name a certificate that holds") from error
    return SigningKey(private, public, tuple(chain))


def sign_files(files: Mapping[str, str], name: str, key: SigningKey) -> bytes:
    """The signature file over `files` (relative path → sha256 in hex) of the model called `name`."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    ordered = {path: files[path] for path in sorted(files, key=lambda path: PurePosixPath(path).parts)}
    payload = _json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": root_digest(ordered)}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "serialization": {
                    "method": "files",
                    "hash_type": "sha256",
                    "allow_symlinks": False,
                    "ignore_paths": [SIGNATURE],
                },
                "resources": [{"name": n, "algorithm": "sha256", "digest": d} for n, d in ordered.items()],
            },
        }
    )
    digest = getattr(hashes, key.public.curve.digest.upper())()
    value = key.private.sign(Signature(payload, b"", "", ()).message, ECDSA(digest, deterministic_signing=True))
    material: dict[str, Any] = (
        {"x509CertificateChain": {"certificates": [{"rawBytes": _base64(der)} for der in key.chain]}}
        if key.chain
        else {"publicKey": {"hint": key.public.id}}
    )
    return _json(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {**material, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": _base64(payload),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": _base64(value), "keyid": ""}],
            },
        }
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _how() -> str:
    return "Make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"


@dataclass(frozen=True)
class Signed(Displayed):
    """What `sign_bundle` did: how many files the signature covers, and the id of the key (docs/signing.md)."""

    bundle: Path
    files: int
    key: str
    curve: str
    certificates: int


def sign_bundle(
    path: str | Path, key: str | Path, *, certificates: Sequence[str | Path] = (), force: bool = False
) -> Signed:
    """Sign the bundle at `path`: `model.sig` beside its manifest, in a directory as in an .edgeq file.

    Args:
        key: private key, PEM.
        certificates: see `read_signing_key`.
        force: replace the signature that it has.

    Raises:
        BundleError: it is no bundle, or a damaged one.
        OutputError: it is signed already, or cannot be written.
        DataError, UsageError, RuntimeUnavailableError: see `read_signing_key`.
    """
    path = path_of(path, "bundle")
    signing = read_signing_key(Path(key), [Path(certificate) for certificate in certificates])
    with opened(path) as bundle:
        if bundle.signature is not None and not force:
            raise OutputError(f"{path} is signed already", "Pass --force to replace its signature")
        digests = {name: record.sha256 for name, record in bundle.files.items()}
        digests[MANIFEST] = bundle.manifest_sha256
        signature = sign_files(digests, bundle.name or path.stem, signing)
        if path.is_dir():
            place = path / SIGNATURE
            if place.exists() and not is_signature(place):
                raise OutputError(f"{place} is no signature", "Move it")
            with output_file(place, force=force) as draft:
                draft.write_bytes(signature)
        else:
            with output_file(path, force=True) as draft:
                write_archive(contents(replace(bundle, signature=signature)), draft)
    return Signed(path, len(digests), signing.public.id, signing.public.curve.name, len(signing.chain))
