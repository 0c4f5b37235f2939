"""`edgeq verify`: a bundle's hashes, and the self-test of every variant that this machine can run."""

from __future__ import annotations

from pathlib import Path

from edgeq_device.sessions import read_device
from edgeq_device.trust import check_signature, trust_for
from edgeq_device.verify import Report, verify

from edgeq.bundle.read import opened
from edgeq.device import device_errors
from edgeq.model.path import path_of
from edgeq.progress import SILENT, Progress
from edgeq.signing.certificates import verified_key


def verify_bundle(
    path: str | Path,
    *,
    variant: str | None = None,
    trust: str | Path | None = None,
    require_signature: bool = False,
    expect: str | None = None,
    progress: Progress = SILENT,
) -> Report:
    """Open the bundle at `path` with every check, then load and self-test what can run here.

    The report lists all variants; `check_report` turns a bad one into an error.

    Args:
        trust: file or folder of the keys and certificates whose signature the bundle must have (docs/signing.md);
            without it that of this machine, $EDGEQ_TRUST or /etc/edgeq/trust, if there is one.
        require_signature: refuse where neither is there.
        expect: the sha256 that its manifest must have, as the sender says.

    Raises:
        BundleError: the bundle is damaged, was changed, is not signed as it must be, is another one than expected, or
            has no variant of that name.
        UsageError: the trusted keys cannot be read, or there are none and a signature is required; `expect` is no
            sha256.
        RuntimeUnavailableError: onnxruntime is missing; cryptography, where a certificate must be verified.
    """
    path = path_of(path, "bundle")
    with progress.stage(f"verifying {path}"), device_errors():
        trusted = trust_for(Path(trust) if trust is not None else None, required=require_signature)
        with opened(path, expect=expect) as bundle:
            signer = check_signature(bundle, trusted, verified_key)
            return verify(bundle, read_device(), variant, signer)


def check_report(report: Report) -> None:
    """Raise CheckFailedError if a variant failed, BundleError if none could run here."""
    with device_errors():
        report.check()


def check_trusted(path: Path, *, trust: Path | None, required: bool, expect: str | None) -> str | None:
    """Refuse a bundle that is not signed as `verify_bundle` wants it; where no trust is given, do nothing.

    Returns:
        The sha256 that its manifest must have when it is opened again: that of the signed one, else `expect`.
    """
    with device_errors():
        trusted = trust_for(trust, required=required)
        if trusted is None:
            return expect
        with opened(path, expect=expect) as bundle:
            check_signature(bundle, trusted, verified_key)
            return bundle.manifest_sha256
