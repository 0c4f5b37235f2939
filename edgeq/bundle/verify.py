"""`edgeq verify`: a bundle's hashes, and the self-test of every variant that this machine can run."""

from __future__ import annotations

from pathlib import Path

from edgeq_device.sessions import read_device
from edgeq_device.verify import Report, verify

from edgeq.bundle.read import opened
from edgeq.device import device_errors
from edgeq.progress import SILENT, Progress


def verify_bundle(path: str | Path, *, variant: str | None = None, progress: Progress = SILENT) -> Report:
    """Open the bundle at `path` with every check, then load and self-test what can run here.

    The report lists all variants; `check_report` turns a bad one into an error.

    Raises:
        BundleError: the bundle is damaged, was changed, or has no variant of that name.
        RuntimeUnavailableError: onnxruntime is missing.
    """
    path = Path(path)
    with progress.stage(f"verifying {path}"), opened(path) as bundle:
        return verify(bundle, read_device(), variant)


def check_report(report: Report) -> None:
    """Raise CheckFailedError if a variant failed, BundleError if none could run here."""
    with device_errors():
        report.check()
