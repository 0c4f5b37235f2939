"""Sign bundles with a private key, and with its certificates if it has any. This needs `cryptography`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from edgeq_device.bundle.manifest import MANIFEST
from edgeq_device.system.files import read_file
from edgeq_device.trust.signature import (
    BUNDLE_TYPE,
    PAYLOAD_TYPE,
    PREDICATE_TYPE,
    SIGNATURE,
    STATEMENT_TYPE,
    BundleSignature,
    PublicKey,
    hash_digests,
    read_public_key,
)

from edgeq.bundle.verify import check_cryptography, open_checked, read_contents, verify_chain
from edgeq.bundle.write import is_signature, write_archive
from edgeq.errors import BundleError, DataError, OutputError, UsageError
from edgeq.util.device_errors import device_errors
from edgeq.util.display import Displayed
from edgeq.util.outputs import output_file
from edgeq.util.paths import path_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


PASSWORD = "EDGEQ_KEY_PASSWORD"


@dataclass(frozen=True)
class SigningKey:
    """Hold a private key, its public key, and its certificate chain, if it has one.

    Attributes:
        chain: certificates in DER, the key's own certificate first; empty if there are none.
    """

    private: EllipticCurvePrivateKey
    public: PublicKey
    chain: tuple[bytes, ...] = ()


def read_signing_key(path: Path, certificates: Sequence[Path] = ()) -> SigningKey:
    """Return the private key in a PEM file. $EDGEQ_KEY_PASSWORD decrypts an encrypted key.

    Args:
        certificates: PEM files: the key's own certificate first, then those of its issuers. The root may be left out.

    Raises:
        DataError: a file cannot be read, the password is wrong, or the key is not an elliptic-curve key on P-256, P-384
            or P-521.
        UsageError: the password is missing, the first certificate is for another key, or the certificates are not
            valid.
        RuntimeUnavailableError: cryptography is not installed.
    """
    check_cryptography()
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    password = os.environ.get(PASSWORD)
    try:
        data = read_file(path)
        # A password for a key that has none is an error in cryptography.
        private = load_pem_private_key(data, password.encode() if password and b"ENCRYPTED" in data else None)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", "Name a private key") from error
    except TypeError as error:
        raise UsageError(f"{path} is encrypted", f"Set {PASSWORD}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise DataError(f"{path} is not a private key in PEM, or the password is wrong", _key_advice()) from error
    if not isinstance(private, EllipticCurvePrivateKey):
        raise DataError(f"{path} is not an elliptic-curve key", _key_advice())
    with device_errors():
        spki = private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        public = read_public_key(spki, str(path))
    chain: list[bytes] = []
    for file in certificates:
        try:
            parsed = x509.load_pem_x509_certificates(read_file(file))
        except (OSError, ValueError) as error:
            raise DataError(f"{file} has no readable certificate in PEM") from error
        if not chain and parsed[0].public_key() != private.public_key():
            raise UsageError(f"{file} is not the certificate of {path}", "Name the key's own certificate first")
        chain += [certificate.public_bytes(Encoding.DER) for certificate in parsed]
    if chain:
        # Refuse a certificate that has expired or is not for signing. Otherwise, everyone who verifies the bundle would
        # refuse it later.
        try:
            verify_chain(chain, chain[-1:])
        except BundleError as error:
            raise UsageError(f"{certificates[0]}: {error.problem}", "Name a valid certificate") from error
    return SigningKey(private, public, tuple(chain))


def sign_files(files: Mapping[str, str], name: str, key: SigningKey) -> bytes:
    """Return a signature file for the files of the model called `name`.

    Args:
        files: sha256 of each file in hex, by relative path.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA

    # Model Signing sorts paths part by part, not as text.
    ordered = {path: files[path] for path in sorted(files, key=lambda path: PurePosixPath(path).parts)}
    payload = _format_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": hash_digests(ordered)}}],
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
    # Deterministic (RFC 6979), so that the same bundle and key give the same bytes.
    value = key.private.sign(BundleSignature(payload, b"", "", ()).message, ECDSA(digest, deterministic_signing=True))
    material: dict[str, Any] = (
        {"x509CertificateChain": {"certificates": [{"rawBytes": _encode(der)} for der in key.chain]}}
        if key.chain
        else {"publicKey": {"hint": key.public.id}}
    )
    return _format_json(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {**material, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": _encode(payload),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": _encode(value), "keyid": ""}],
            },
        }
    )


def _format_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _key_advice() -> str:
    return "Make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"


@dataclass(frozen=True)
class Signed(Displayed):
    """Report the result of `sign_bundle`: the number of signed files, and the id of the key (docs/signing.md)."""

    bundle: Path
    files: int
    key: str
    curve: str
    certificates: int


def sign_bundle(
    path: str | Path, key: str | Path, *, certificates: Sequence[str | Path] = (), force: bool = False
) -> Signed:
    """Sign the bundle at `path`, which is a directory or an .edgeq file. The signature `model.sig` goes next to its
    manifest.

    Args:
        key: path of the private key, a PEM file.
        certificates: see `read_signing_key`.
        force: whether to replace an existing signature.

    Raises:
        BundleError: `path` is not a bundle, or the bundle is damaged.
        OutputError: the bundle is already signed, or cannot be written.
        DataError, UsageError, RuntimeUnavailableError: see `read_signing_key`.
    """
    path = path_of(path, "bundle")
    signing = read_signing_key(Path(key), [Path(certificate) for certificate in certificates])
    with open_checked(path) as bundle:
        if bundle.signature is not None and not force:
            raise OutputError(f"{path} is already signed", "Pass ⟨force=True⟩ to replace its signature")
        digests = {name: record.sha256 for name, record in bundle.files.items()}
        digests[MANIFEST] = bundle.manifest_sha256
        signature = sign_files(digests, bundle.name or path.stem, signing)
        if path.is_dir():
            place = path / SIGNATURE
            if place.exists() and not is_signature(place):
                raise OutputError(f"{place} is not a signature", "Move it")
            with output_file(place, force=force) as draft:
                draft.write_bytes(signature)
        else:
            with output_file(path, force=True) as draft:
                # A zip cannot get a member in place without a moment in which it is damaged.
                write_archive(read_contents(replace(bundle, signature=signature)), draft)
    return Signed(path, len(digests), signing.public.id, signing.public.curve.name, len(signing.chain))
