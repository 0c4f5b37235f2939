"""Certificate chains, verified by `cryptography`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edgeq_device.ecdsa import PublicKey, read_public_key

from edgeq.errors import BundleError, RuntimeUnavailableError, UsageError

if TYPE_CHECKING:
    from cryptography.x509 import Certificate
    from cryptography.x509.verification import PolicyBuilder

_FIX = "Do not use it, unless its certificate authority belongs among the trusted ones"


def check_cryptography() -> None:
    """Raise RuntimeUnavailableError where `cryptography` is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise RuntimeUnavailableError(
            "signing and verifying certificates need cryptography", "Install it: pip install 'edgeq[sign]'"
        ) from error


def verified_key(chain: Sequence[bytes], trusted: Sequence[bytes]) -> PublicKey:
    """The key of the first certificate of `chain`, where it leads to one of `trusted` today and may sign (all in DER).

    The first must allow digital signatures or code signing; those between must be of certificate authorities.

    Raises:
        BundleError: it does not, or one of the chain cannot be read.
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
        leaf, *others = (x509.load_der_x509_certificate(der) for der in chain)
        # The client's verifier is the one that compares no host name.
        _policy().store(store).build_client_verifier().verify(leaf, others)
        usable = _may_sign(leaf)
    except (ValueError, VerificationError) as error:
        raise BundleError(f"the certificate that signed it is not trusted ({error})", _FIX) from error
    if not usable:
        raise BundleError("the certificate that signed it is not for signing", _FIX)
    der = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return read_public_key(der, "the certificate that signed it")


def _policy() -> PolicyBuilder:
    from cryptography import x509
    from cryptography.x509.verification import Criticality, ExtensionPolicy, Policy, PolicyBuilder

    def authority(policy: Policy, certificate: Certificate, found: x509.BasicConstraints) -> None:
        """Refuse an issuer that is no certificate authority."""
        del policy, certificate
        if not found.ca:
            raise ValueError("an issuer is no certificate authority")

    def issues(policy: Policy, certificate: Certificate, found: x509.KeyUsage | None) -> None:
        """Refuse an issuer whose key may not sign certificates."""
        del policy, certificate
        if found is not None and not found.key_cert_sign:
            raise ValueError("an issuer may not sign certificates")

    # The library's own policies are those of the web: a name of a host, and the usages of TLS.
    anything = ExtensionPolicy.permit_all()
    authorities = anything.require_present(x509.BasicConstraints, Criticality.AGNOSTIC, authority)
    authorities = authorities.may_be_present(x509.KeyUsage, Criticality.AGNOSTIC, issues)
    return PolicyBuilder().extension_policies(ca_policy=authorities, ee_policy=anything)


def _may_sign(certificate: Certificate) -> bool:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    found = certificate.extensions
    try:
        if found.get_extension_for_class(x509.KeyUsage).value.digital_signature:
            return True
    except x509.ExtensionNotFound:
        return False
    try:
        usages = found.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return ExtendedKeyUsageOID.CODE_SIGNING in usages
