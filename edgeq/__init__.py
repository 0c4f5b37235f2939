"""Quantize ONNX models for the hardware they will run on, prove the result, and ship it as a bundle.

The commands of `edgeq` are built on the functions of this package. Each function is imported when it is first used, so
`edgeq -h` and `import edgeq` start at once.
"""

from __future__ import annotations

# Nothing is imported here, so that `edgeq.__main__` handles Ctrl-C as early as possible.
TYPE_CHECKING = False

__version__ = "0.2.0"

if TYPE_CHECKING:
    from typing import Any

    from edgeq_device.measure.bench_settings import BenchSettings

    from edgeq.bundle.sign import sign_bundle as sign
    from edgeq.bundle.transfer import pull_bundle as pull
    from edgeq.bundle.transfer import push_bundle as push
    from edgeq.bundle.verify import verify_bundle as verify
    from edgeq.data.open_source import Data
    from edgeq.data.preprocess import register as register_preprocess
    from edgeq.data.sample import Sample
    from edgeq.data.samples import Samples, open_samples
    from edgeq.errors import EdgeqError
    from edgeq.hardware.detected import detect
    from edgeq.hardware.target import resolve as resolve_target
    from edgeq.jobs.calibrate import calibrate
    from edgeq.jobs.inspect import inspect
    from edgeq.jobs.package import package
    from edgeq.jobs.quantize import quantize
    from edgeq.jobs.tune import tune
    from edgeq.measure.accuracy import evaluate
    from edgeq.measure.bench import BenchData, bench
    from edgeq.measure.debug import debug
    from edgeq.measure.task import TaskOptions, make_task
    from edgeq.reporting.bundle import report_bundle as report
    from edgeq.reporting.compare import compare
    from edgeq.retargeting.run import retarget
    from edgeq.scheme import Scheme
    from edgeq.tuning.goal import Goal
    from edgeq.tuning.recover.float_search import recovering
    from edgeq.util.display import SILENT
    from edgeq.util.records import plain

# Map each public name to its module and attribute.
_PUBLIC = {
    "BenchData": "edgeq.measure.bench:BenchData",
    "BenchSettings": "edgeq_device.measure.bench:BenchSettings",
    "Data": "edgeq.data.open_source:Data",
    "EdgeqError": "edgeq.errors:EdgeqError",
    "Goal": "edgeq.tuning.goal:Goal",
    "SILENT": "edgeq.util.display:SILENT",
    "Sample": "edgeq.data.samples:Sample",
    "Samples": "edgeq.data.samples:Samples",
    "Scheme": "edgeq.scheme:Scheme",
    "TaskOptions": "edgeq.measure.task:TaskOptions",
    "bench": "edgeq.measure.bench:bench",
    "calibrate": "edgeq.jobs.calibrate:calibrate",
    "compare": "edgeq.reporting.compare:compare",
    "debug": "edgeq.measure.debug:debug",
    "detect": "edgeq.hardware.detected:detect",
    "evaluate": "edgeq.measure.accuracy:evaluate",
    "inspect": "edgeq.jobs.inspect:inspect",
    "make_task": "edgeq.measure.task:make_task",
    "open_samples": "edgeq.data.samples:open_samples",
    "package": "edgeq.jobs.package:package",
    "plain": "edgeq.util.records:plain",
    "pull": "edgeq.bundle.transfer:pull_bundle",
    "push": "edgeq.bundle.transfer:push_bundle",
    "quantize": "edgeq.jobs.quantize:quantize",
    "recovering": "edgeq.tuning.recover.float_search:recovering",
    "register_preprocess": "edgeq.data.preprocess:register",
    "report": "edgeq.reporting.bundle:report_bundle",
    "retarget": "edgeq.retargeting.run:retarget",
    "resolve_target": "edgeq.hardware.target:resolve",
    "sign": "edgeq.bundle.sign:sign_bundle",
    "tune": "edgeq.jobs.tune:tune",
    "verify": "edgeq.bundle.verify:verify_bundle",
}

__all__ = [
    "SILENT",
    "BenchData",
    "BenchSettings",
    "Data",
    "EdgeqError",
    "Goal",
    "Sample",
    "Samples",
    "Scheme",
    "TaskOptions",
    "__version__",
    "bench",
    "calibrate",
    "compare",
    "debug",
    "detect",
    "evaluate",
    "inspect",
    "make_task",
    "open_samples",
    "package",
    "plain",
    "pull",
    "push",
    "quantize",
    "recovering",
    "register_preprocess",
    "report",
    "resolve_target",
    "retarget",
    "sign",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'edgeq' has no attribute {name!r}")
    import importlib
    from types import FunctionType

    module, _, attribute = _PUBLIC[name].partition(":")
    value = getattr(importlib.import_module(module), attribute)
    if not isinstance(value, FunctionType):
        return value
    from edgeq.util.public import public

    return public(value, takes_models=True)


def __dir__() -> list[str]:
    return __all__
