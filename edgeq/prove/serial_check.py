"""Check a bundle by the output of a chip that has no runner: which file the chip ran, and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgeq_device.bundle.package import Bundle
from edgeq_device.system.files import open_file

from edgeq.backends.base import SerialLog, backend_for
from edgeq.bundle.verify import open_checked
from edgeq.errors import CheckFailedError, DataError, UsageError
from edgeq.hardware.target import find_target, is_known
from edgeq.util.display import Displayed
from edgeq.util.marker import sha256

# A monitor that runs for hours prints more, but a check is at the beginning.
_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class SerialCheck(Displayed):
    """Report a chip's check of one variant.

    Attributes:
        manifest_sha256, log_sha256: hashes of the bundle's manifest and of the chip's output, which this report is
            about.
        log: the chip's check.
    """

    bundle: Path
    variant: str
    target: str
    manifest_sha256: str
    log_sha256: str
    log: SerialLog

    def lines(self) -> Sequence[str]:
        """Return the report for people."""
        count = len(self.log.tensors)
        tested = f"{count} tensor{'s' * (count != 1)} compared"
        outcome = f"passed on {self.log.chip}: {tested}" if self.log.passed else f"failed on {self.log.chip}"
        timed = f", {self.log.microseconds / 1000:.2f} ms for one run" if self.log.microseconds else ""
        return (
            f"{self.variant}: {outcome}{timed}",
            *([f"reason: {self.log.reason}"] if self.log.reason else []),
            f"file sha256 {self.log.file}",
            f"manifest sha256 {self.manifest_sha256}",
            f"output sha256 {self.log_sha256}",
        )

    def check(self) -> None:
        """Raise CheckFailedError if the chip's check failed."""
        if not self.log.passed:
            raise CheckFailedError(f"{self.variant}: {self.log.reason}", "Do not deploy it on this chip")


def check_log(bundle: Path, log: Path, *, variant: str | None = None, expect: str | None = None) -> SerialCheck:
    """Return the check that a chip printed, for the variant whose file it ran.

    Args:
        log: the chip's output.
        variant: name of the variant; None for the one whose file the chip ran.
        expect: the sha256 that the bundle's manifest must have.

    Raises:
        UsageError: the bundle has no such variant.
        DataError: the output has no check, or the chip ran a file that is not in the bundle.
        BundleError: the bundle has wrong names, sizes, hashes or keys.
    """
    try:
        with open_file(log) as stream:
            text = stream.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"{log} cannot be read: {error.strerror or error}", "Give the file of the output") from error
    with open_checked(bundle, expect=expect) as opened:
        names = [v.name for variants in opened.components.values() for v in variants]
        if variant is not None and variant not in names:
            raise UsageError(f"{bundle} has no variant {variant!r}", f"It has {', '.join(names)}")
        printed = False
        for name, target in _variants(opened, variant):
            printed_log = backend_for(find_target(target)).read_log(text)
            printed = printed or printed_log is not None
            if printed_log is not None and printed_log.file in _hashes(opened, name):
                return SerialCheck(bundle, name, target, opened.manifest_sha256, sha256(log), printed_log)
    if printed:
        raise DataError(f"{log}: the chip ran a file that is not in {bundle}", "Flash the bundle's file")
    raise DataError(f"{log} has no check of a variant of {bundle}", "Give the chip's output from its start")


def _variants(bundle: Bundle, variant: str | None) -> list[tuple[str, str]]:
    """Return names and targets of the variants that could have been checked."""
    named = [
        (v.name, str(v.info["target"]))
        for variants in bundle.components.values()
        for v in variants
        if "target" in v.info and (variant is None or v.name == variant)
    ]
    return [(name, target) for name, target in named if is_known(target)]


def _hashes(bundle: Bundle, variant: str) -> set[str]:
    """Return the hashes of the additional files of a variant."""
    return {record.sha256 for name, record in bundle.files.items() if f"/{variant}/" in name}
