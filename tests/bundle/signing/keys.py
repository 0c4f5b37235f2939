"""Make keys and certificates for tests."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}
NOW = datetime.datetime.now(datetime.UTC)


def write_key(folder: Path, name: str = "key", curve: str = "P-256", password: bytes = b"") -> Path:
    """Write NAME.pem with NAME.pub next to it."""
    private = ec.generate_private_key(CURVES[curve])
    encryption: Any = BestAvailableEncryption(password) if password else NoEncryption()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.pem"
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    path.with_suffix(".pub").write_bytes(public)
    return path


def write_certificate(
    path: Path,
    public: ec.EllipticCurvePublicKey,
    issuer: tuple[str, ec.EllipticCurvePrivateKey],
    *,
    authority: bool = False,
    signs: bool = True,
    days: int = 10,
) -> Path:
    """Write the certificate of the key that has the file's name, valid from 20 days ago for 20 + `days` days."""
    name, private = issuer
    usages = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign")
    usage = x509.KeyUsage(
        digital_signature=signs,
        key_cert_sign=authority,
        encipher_only=False,
        decipher_only=False,
        **dict.fromkeys(usages, False),
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name.from_rfc4514_string(f"CN={path.stem}"))
        .issuer_name(x509.Name.from_rfc4514_string(f"CN={name}"))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - datetime.timedelta(days=20))
        .not_valid_after(NOW + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(private, hashes.SHA256())
    )
    path.write_bytes(certificate.public_bytes(Encoding.PEM))
    return path


def read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the key that `write_key` wrote."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(path.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def write_chain(folder: Path, **leaf: Any) -> tuple[Path, Path, Path, Path]:
    """Write root → issuer → signer. Return the signer's key, its certificate, the issuer's and the root's."""
    root, issuer, signer = (read_private(write_key(folder, name)) for name in ("root", "issuer", "signer"))
    top = write_certificate(folder / "root.crt", root.public_key(), ("root", root), authority=True)
    middle = write_certificate(folder / "issuer.crt", issuer.public_key(), ("root", root), authority=True)
    own = write_certificate(folder / "signer.crt", signer.public_key(), ("issuer", issuer), **leaf)
    return folder / "signer.pem", own, middle, top
