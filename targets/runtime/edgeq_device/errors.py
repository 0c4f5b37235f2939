"""Define what the device side raises on purpose, with the exit codes of edgeq/errors.py.

    DeviceError                  1
    ├── UsageError               2   an argument that makes no sense
    ├── DataError                4   inputs: missing, unreadable, wrong name, shape or dtype
    ├── OutputError              6   a place that cannot be written, or that holds something already
    ├── BundleError              7   a bundle that is damaged, tampered with or not for this device
    ├── RuntimeUnavailableError  8   onnxruntime is missing, or refuses the model
    ├── CheckFailedError        10   a self-test that did not hold
    └── BudgetError             12   more memory or processor time than the budget has

The device side has a tree of its own because it imports nothing of edgeq; edgeq translates it class by class.
"""

from __future__ import annotations

AGAIN = "Do not use this bundle; get it again from where it was made"
"""What to do about one that is not as it was made."""


class DeviceError(Exception):
    """Serve as the base of all deliberate failures: one line that says what is wrong and where, and what to do about
    it.
    """

    exit_code = 1

    def __init__(self, problem: str, fix: str = "") -> None:
        self.problem = problem
        self.fix = fix
        super().__init__(f"{problem}. {fix}" if fix else problem)


class UsageError(DeviceError):
    exit_code = 2


class DataError(DeviceError):
    exit_code = 4


class OutputError(DeviceError):
    exit_code = 6


class BundleError(DeviceError):
    exit_code = 7


class RuntimeUnavailableError(DeviceError):
    exit_code = 8


class CheckFailedError(DeviceError):
    exit_code = 10


class BudgetError(DeviceError):
    exit_code = 12
