"""Check the signature of an opened bundle against the keys that its user trusts."""

from __future__ import annotations

from typing import Optional

from edgeq_device.bundle.manifest import MANIFEST
from edgeq_device.bundle.package import Bundle
from edgeq_device.errors import BundleError
from edgeq_device.trust.keys import Chain, Signer, Trust, verify_signature


def check_signature(bundle: Bundle, trust: Optional[Trust], chain: Optional[Chain] = None) -> Optional[Signer]:
    """Return the signer of an opened bundle, whose files have already been hashed. Return None if there is no `trust`.

    Raises:
        BundleError: for the same reasons as `verify_signature`, or if the directory contains a file that nobody signed.
    """
    if trust is None:
        return None
    if bundle.extra:
        raise BundleError(
            f"{bundle.source}: {bundle.extra[0]!a} is not signed, and {trust.source} requires signed files",
            "Move files that are not part of the bundle out of it",
        )
    digests = {name: record.sha256 for name, record in bundle.files.items()}
    # The manifest cannot list its own hash, but the signature covers it.
    digests[MANIFEST] = bundle.manifest_sha256
    return verify_signature(bundle.signature, digests, trust, str(bundle.source), chain)
