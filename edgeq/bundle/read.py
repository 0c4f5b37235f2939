"""Opening a bundle on the workstation: the device's own reader, its errors as edgeq's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgeq_device import errors as device
from edgeq_device.package import Bundle, open_bundle

from edgeq import errors

_SAME: dict[type[device.DeviceError], type[errors.EdgeqError]] = {
    device.UsageError: errors.UsageError,
    device.DataError: errors.DataError,
    device.OutputError: errors.OutputError,
    device.BundleError: errors.BundleError,
    device.RuntimeUnavailableError: errors.RuntimeUnavailableError,
    device.CheckFailedError: errors.CheckFailedError,
}


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn what the device side raises into the edgeq error of the same name."""
    try:
        yield
    except device.DeviceError as error:
        raise _SAME.get(type(error), errors.EdgeqError)(error.problem, error.fix) from error


@contextmanager
def opened(path: Path) -> Iterator[Bundle]:
    """The bundle at `path` (a directory or an .edgeq file), checked; errors of the device side inside are translated.

    Raises:
        BundleError: names, sizes, hashes or keys that are not right.
    """
    with device_errors(), open_bundle(path) as bundle:
        yield bundle
