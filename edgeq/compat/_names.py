"""Find the names that the modules of onnxruntime.quantization define. edgeq's own names take precedence over
onnxruntime's.

Most of those modules have no file in `edgeq.compat` and are listed only in a table in this file. `import
edgeq.compat.qdq_quantizer` still works, because a finder on `sys.meta_path` makes the module.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ONNXRUNTIME = "1.32"
"""The release of onnxruntime whose public names the tables cover."""
_PACKAGE = "edgeq.compat."
_FUNCTIONS = {
    "CalibraterBase": "calibrators",
    "CalibratorBase": "calibrators",
    "calibrate": "calibrators",
    "create_calibrator": "calibrators",
    "quant_pre_process": "preprocess",
    "quantize": "quantize",
    "quantize_dynamic": "files",
    "quantize_model": "legacy",
    "quantize_qat": "files",
    "quantize_static": "files",
    "write_calibration_table": "calibrators",
}
_OWN = {
    **_FUNCTIONS,
    **dict.fromkeys(("ImageNetDataReader", "ResNet50DataReader", "YoloV3DataReader"), "readers"),
    **dict.fromkeys(("YoloV3VariantDataReader", "YoloV3VisionDataReader"), "readers"),
    **dict.fromkeys(("ImageClassificationEvaluator", "YoloV3Evaluator", "YoloV3VariantEvaluator"), "evaluators"),
}
"""Name in onnxruntime or its examples that edgeq replaces → the module of edgeq that defines it."""
# Scripts use `from onnxruntime.quantization.calibrate import *` and the like.
_WITH_ALL = ("calibrate", "quant_utils", "quantize")
"""Modules for which `import *` imports edgeq's functions."""
_FILES = (
    *("calibrate", "matmul_4bits_quantizer", "matmul_bnb4_quantizer", "matmul_nbits_quantizer", "preprocess"),
    *("qdq_loss_debug", "quant_utils", "quantize", "static_quantize_runner"),
)
_HANDED_ON = (
    *("CalTableFlatBuffers", "CalTableFlatBuffers.KeyValue", "CalTableFlatBuffers.TrtTable"),
    *("base_quantizer", "cuda_quantizer", "onnx_model", "onnx_quantizer", "qdq_quantizer", "registry"),
    *("shape_inference", "tensor_quant_overrides", "execution_providers", "execution_providers.qnn"),
    *("execution_providers.qnn.mixed_precision_overrides_utils", "execution_providers.qnn.preprocess"),
    "execution_providers.qnn.quant_config",
)
"""Modules without a file. The names in them come from onnxruntime, except for the names that edgeq replaces."""
_PASS = "It is a pass of qnn_preprocess_model. Call edgeq.compat.execution_providers.qnn.qnn_preprocess_model"
LEFT_OUT: Mapping[str, str] = {
    "execution_providers.qnn.fusion_lpnorm": _PASS,
    "execution_providers.qnn.fusion_spacetodepth": _PASS,
    "fusions": "Its classes are passes of onnxruntime's pre-processing. Call edgeq.compat.quant_pre_process",
    "neural_compressor": "It is a copy of another tool's code, which MatMulNBitsQuantizer calls. "
    "Give a configuration of edgeq.compat.matmul_nbits_quantizer to its MatMulNBitsQuantizer",
    "operators": "Its classes write single operators for onnxruntime's quantizer, and edgeq does not use them. "
    "Import them from onnxruntime.quantization.operators",
}
"""Module of onnxruntime.quantization without a counterpart → one sentence on the reason and one on what to do
instead.
"""


def find(name: str, module: str = "") -> Any:
    """Return the object called `name` in `edgeq.compat` or in its module `module`.

    Raises:
        AttributeError: neither edgeq nor onnxruntime's module has the name, or edgeq leaves the module out.
        RuntimeUnavailableError: onnxruntime is not installed.
    """
    place = f"{module}.{name}" if module else name
    # Modules come first, because "quantize" and "calibrate" are names of functions as well.
    if place in (*_FILES, *_HANDED_ON):
        return importlib.import_module(_PACKAGE + place)
    if place in LEFT_OUT:
        raise AttributeError(why(place))
    # A star import must bring edgeq's functions, so onnxruntime's own list is not used.
    if name == "__all__" and module in _WITH_ALL:
        return list(_FUNCTIONS)
    if name in _OWN:
        return getattr(importlib.import_module(_PACKAGE + _OWN[name]), name)
    if name.startswith("_"):  # the import system looks up __path__
        raise AttributeError(f"module {(_PACKAGE + module).rstrip('.')!r} has no attribute {name!r}")
    return getattr(quantization_tools(module), name)


def names() -> set[str]:
    """Return the names in `edgeq.compat`: its own names and modules, and the names that onnxruntime.quantization
    exports.
    """
    theirs = {name for name, value in vars(quantization_tools()).items() if not isinstance(value, ModuleType)}
    modules = {place for place in (*_FILES, *_HANDED_ON) if "." not in place}
    return {*_OWN, *modules, *(name for name in theirs if not name.startswith("_"))}


def quantization_tools(module: str = "") -> Any:
    """Return `onnxruntime.quantization`, or a module of it by name.

    Raises:
        RuntimeUnavailableError: onnxruntime is not installed.
    """
    from edgeq.run.session import onnxruntime

    # This raises the error that says how to install onnxruntime. The import below would raise ImportError.
    onnxruntime()
    return importlib.import_module(f"onnxruntime.quantization.{module}".rstrip("."))


def why(module: str) -> str:
    """Return one line that states why edgeq leaves a module out and what to do instead."""
    return f"edgeq.compat has no {module}. {LEFT_OUT[module]}"


class _HandedOn(ModuleType):
    """Give access to the names in onnxruntime's module of the same name."""

    def __getattr__(self, name: str) -> Any:
        return find(name, self.__name__.removeprefix(_PACKAGE))


class _CompatFinder(MetaPathFinder, Loader):
    """Make the modules that have no file, and refuse to import modules that edgeq leaves out."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that has no file here. Return None for other names, so that other finders search
        for them.
        """
        module = fullname.removeprefix(_PACKAGE)
        if module == fullname or module not in (*LEFT_OUT, *_HANDED_ON):
            return None
        if module in LEFT_OUT:
            # Returning None would give "no module named", which hides the reason.
            raise ImportError(why(module), name=fullname)
        return ModuleSpec(fullname, self, is_package=any(place.startswith(f"{module}.") for place in _HANDED_ON))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that gives access to onnxruntime's names."""
        return _HandedOn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing. A name in the module is looked up when a script uses it."""


# At the end of the list, so that a module with a file is found by Python itself.
sys.meta_path.append(_CompatFinder())
