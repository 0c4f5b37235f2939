"""Turn the errors of edgeq_device, which knows nothing of edgeq, into edgeq's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgeq_device.errors import DeviceError

from edgeq import errors
from edgeq.arguments import with_marks
from edgeq.errors import EdgeqError


@contextmanager
def device_errors() -> Iterator[None]:
    """Raise errors of edgeq_device as the edgeq errors of the same name, with marks for the options that they name."""
    try:
        yield
    except DeviceError as error:
        # The names agree by design, and an error that only the device knows becomes the base class.
        kind: type[EdgeqError] = getattr(errors, type(error).__name__, EdgeqError)
        raise kind(with_marks(error.problem), with_marks(error.fix)) from error
