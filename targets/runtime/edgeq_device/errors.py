"""Define the exceptions that the device side raises on purpose, with the exit codes of edgeq/errors.py.

    DeviceError                  1
    ├── UsageError               2   an argument makes no sense
    ├── DataError                4   inputs are missing or unreadable, or have a wrong name, shape or dtype
    ├── OutputError              6   a path cannot be written, or already exists
    ├── BundleError              7   a bundle is damaged, was tampered with, or is not for this device
    ├── RuntimeUnavailableError  8   onnxruntime is missing, or refuses the model
    ├── CheckFailedError        10   a self-test failed
    └── BudgetError             12   the work needs more memory or processor time than the budget allows

The device side has its own exceptions because it imports nothing of edgeq. edgeq translates each of them to its own
exception of the same kind.
"""

from __future__ import annotations

AGAIN = "Do not use this bundle; get it again from where it was made"
"""Solution for a bundle that was changed after it was made."""


class DeviceError(Exception):
    """Serve as the base of all deliberate errors. The message is one line: what is wrong, where it is wrong, and what
    to do about it.
    """

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(f"{problem}. {fix}" if fix else problem)


class UsageError(DeviceError):
    """Report an argument that makes no sense."""

    exit_code = 2


class DataError(DeviceError):
    """Report inputs that are missing or unreadable, or that have a wrong name, shape or dtype."""

    exit_code = 4


class OutputError(DeviceError):
    """Report a path that cannot be written or that already exists."""

    exit_code = 6


class BundleError(DeviceError):
    """Report a bundle that is damaged, was tampered with, or is not for this device."""

    exit_code = 7


class RuntimeUnavailableError(DeviceError):
    """Report that onnxruntime or an engine is missing, or refuses the model."""

    exit_code = 8


class CheckFailedError(DeviceError):
    """Report a self-test that failed."""

    exit_code = 10


class BudgetError(DeviceError):
    """Report work that needs more memory or processor time than the budget allows."""

    exit_code = 12
