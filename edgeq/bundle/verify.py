"""Verify bundles: their contents, their signatures, and certificate chains. Certificates need `cryptography`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from edgeq_device.bundle.manifest import MANIFEST
from edgeq_device.bundle.package import Bundle, open_bundle
from edgeq_device.bundle.signature import check_signature
from edgeq_device.bundle.verify import Report, verify
from edgeq_device.engines.device import read_device
from edgeq_device.trust.keys import find_trust
from edgeq_device.trust.signature import SIGNATURE, PublicKey, read_public_key

from edgeq.errors import BundleError, RuntimeUnavailableError, UsageError
from edgeq.util.device_errors import device_errors
from edgeq.util.display import SILENT, Progress
from edgeq.util.paths import path_of

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from cryptography.x509.verification import PolicyBuilder

_FIX = "Do not use it, unless its certificate authority should be trusted"


def check_cryptography() -> None:
    """Check that `cryptography` is installed.

    Raises:
        RuntimeUnavailableError: it is not installed.
    """
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise RuntimeUnavailableError(
            "signing and verifying certificates need cryptography", "Install it: pip install cryptography"
        ) from error


def verify_chain(chain: Sequence[bytes], trusted: Sequence[bytes]) -> PublicKey:
    """Return the key of the first certificate in `chain`. The chain must be valid today and lead to a certificate in
    `trusted`.

    All certificates are in DER. The first one must allow digital signatures or code signing. The others must belong to
    certificate authorities.

    Raises:
        BundleError: the chain is not trusted, its first certificate is not for signing, or a certificate cannot be
            read.
        UsageError: a trusted certificate cannot be read.
        RuntimeUnavailableError: cryptography is not installed.
    """
    check_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509.verification import Store, VerificationError

    try:
        store = Store([x509.load_der_x509_certificate(der) for der in trusted])
    except ValueError as error:
        raise UsageError(f"a trusted certificate cannot be read ({error})") from error
    try:
        leaf, *issuers = (x509.load_der_x509_certificate(der) for der in chain)
        # Use the verifier for clients, because it does not compare host names.
        _build_policy().store(store).build_client_verifier().verify(leaf, issuers)
        # The verifier accepts a certificate for any use.
        usable = _may_sign(leaf)
    except (ValueError, VerificationError) as error:
        raise BundleError(f"the certificate that signed it is not trusted ({error})", _FIX) from error
    if not usable:
        raise BundleError("the certificate that signed it may not sign", _FIX)
    der = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return read_public_key(der, "the certificate that signed it")


def _build_policy() -> PolicyBuilder:
    from cryptography import x509
    from cryptography.x509.verification import Criticality, ExtensionPolicy, Policy, PolicyBuilder

    def authority(policy: Policy, certificate: Certificate, constraints: x509.BasicConstraints) -> None:
        """Refuse an issuer that is not a certificate authority."""
        del policy, certificate
        if not constraints.ca:
            raise ValueError("an issuer is not a certificate authority")

    def issues(policy: Policy, certificate: Certificate, usage: x509.KeyUsage | None) -> None:
        """Refuse an issuer whose key may not sign certificates."""
        del policy, certificate
        if usage is not None and not usage.key_cert_sign:
            raise ValueError("an issuer may not sign certificates")

    # cryptography's own policies are for the web: they require a host name and key usages of TLS.
    anything = ExtensionPolicy.permit_all()
    authorities = anything.require_present(x509.BasicConstraints, Criticality.AGNOSTIC, authority)
    authorities = authorities.may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, issues)
    return PolicyBuilder().extension_policies(ca_policy=authorities, ee_policy=anything)


def _may_sign(certificate: Certificate) -> bool:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    extensions = certificate.extensions
    try:
        if extensions.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return True
    except x509.ExtensionNotFound:
        return False
    try:
        usages = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return ExtendedKeyUsageOID.CODE_SIGNING in usages


@contextmanager
def open_checked(path: Path, *, expect: str | None = None) -> Iterator[Bundle]:
    """Open and check the bundle at `path` (a directory or an .edgeq file). Inside the `with` block, errors of
    edgeq_device become edgeq errors.

    Args:
        expect: the sha256 that the bundle's manifest must have.

    Raises:
        BundleError: the bundle has wrong names, sizes, hashes or keys.
    """
    with device_errors(), open_bundle(path, expect=expect) as bundle:
        yield bundle


def read_contents(bundle: Bundle) -> dict[str, bytes | Path]:
    """Return the content of every file in the bundle, sorted by path. A value is either bytes or the path of a file."""
    files: dict[str, bytes | Path] = {name: bundle.root / name for name in bundle.files}
    files[MANIFEST] = bundle.manifest
    if bundle.signature is not None:
        files[SIGNATURE] = bundle.signature
    return dict(sorted(files.items()))


def verify_bundle(
    path: str | Path,
    *,
    variant: str | None = None,
    trust: str | Path | None = None,
    require_signature: bool = False,
    expect: str | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Open the bundle at `path` and run every check. Then load the variants that can run here, and run their
    self-tests.

    The report lists all variants. `check_report` raises an error if one failed.

    Args:
        trust: file or folder of keys and certificates, one of which must have signed the bundle (docs/signing.md). None
            uses the keys of this machine, in $EDGEQ_TRUST or /etc/edgeq/trust, if there are any.
        require_signature: whether to refuse the bundle if there are no trusted keys.
        expect: the sha256 that the bundle's manifest must have, as stated by the sender.

    Raises:
        BundleError: the bundle is damaged, was changed, is not signed as required, is not the expected one, or has no
            variant of that name.
        UsageError: the trusted keys cannot be read, a signature is required but there are no keys, or `expect` is not a
            sha256.
        RuntimeUnavailableError: onnxruntime is missing, or cryptography is missing and a certificate must be verified.
    """
    path = path_of(path, "bundle")
    with progress.stage(f"verifying {path}"), device_errors():
        trusted = find_trust(Path(trust) if trust is not None else None, required=require_signature)
        with open_checked(path, expect=expect) as bundle:
            signer = check_signature(bundle, trusted, verify_chain)
            return verify(bundle, read_device(), variant, signer)


def check_report(report: Report) -> None:
    """Check that no variant failed and that at least one could run here.

    Raises:
        CheckFailedError: a variant failed.
        BundleError: no variant could run here.
    """
    with device_errors():
        report.check()


def check_trusted(path: Path, *, trust: Path | None, required: bool, expect: str | None) -> str | None:
    """Refuse a bundle that is not signed as `verify_bundle` requires. Without trusted keys, do nothing.

    Returns:
        The sha256 that the manifest must have when the bundle is opened again. This is the hash of the checked
            manifest, or `expect` if there are no trusted keys.
    """
    with device_errors():
        trusted = find_trust(trust, required=required)
        if trusted is None:
            return expect
        with open_checked(path, expect=expect) as bundle:
            check_signature(bundle, trusted, verify_chain)
            return bundle.manifest_sha256
