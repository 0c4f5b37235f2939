"""Replace `onnxruntime.quantization.matmul_nbits_quantizer`, which quantizes weights to 4 or 8 bits in blocks.

The module is also a command: `python -m edgeq.compat.matmul_nbits_quantizer`.

For the algorithms RTN, k_quant and onnxruntime's default, edgeq searches for the best scales of matrix products. The
format and size of the file stay the same. onnxruntime's own quantizer does everything else: QDQ, tables of Gather,
other algorithms, and float16.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from edgeq_device.system.places import scratch_folder

from edgeq.compat._command import run_printed, run_program
from edgeq.compat._members import member
from edgeq.compat._names import find, quantization_tools
from edgeq.compat._options import ArgumentParser
from edgeq.compat._result import Written, check_written
from edgeq.compat.source import ModelInput, as_given, listed, siblings, warn_unknown_nodes
from edgeq.errors import RuntimeUnavailableError, UsageError
from edgeq.model.convert import from_proto
from edgeq.model.load import load_model, save_model
from edgeq.quantization.block_products import INT8_LEVEL, LEVEL, OPERATOR
from edgeq.quantization.quantizer import refusals
from edgeq.quantization.weight_only import write_weight_only
from edgeq.scheme import ALL_NODES, BLOCK_SIZES, WEIGHT_BITS, Scheme
from edgeq.util.outputs import output_file
from edgeq.util.paths import path_of

_SEARCHED = ("DEFAULT", "RTN", "k_quant")
"""Algorithms that differ only in how they choose the scale and zero point of a block."""
_OWN_WAYS = ("channel_wised_quantize", "ratios", "customized_weight_config")
"""Options that only onnxruntime's own quantizer supports."""
_HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_METHODS = {
    "default": "DefaultWeightOnlyQuantConfig",
    "hqq": "HQQWeightOnlyQuantConfig",
    "rtn": "RTNWeightOnlyQuantConfig",
    "k_quant": "KQuantWeightOnlyQuantConfig",
}


def __getattr__(name: str) -> Any:
    return find(name, "matmul_nbits_quantizer")


class MatMulNBitsQuantizer:
    """Provide the quantizer that ONNX Runtime's documentation describes, with the same arguments. Call `process()`,
    then `model.save_model_to_file(path)`.

    Attributes:
        model: onnxruntime's ONNXModel, quantized after `process`.
        algo_config: a configuration of this module. The default is made from the arguments.
    """

    def __init__(
        self,
        model: ModelInput,
        bits: int = 4,
        block_size: int = 128,
        is_symmetric: bool = False,
        accuracy_level: int | None = None,
        nodes_to_exclude: Sequence[str] | None = None,
        nodes_to_include: Sequence[str] | None = None,
        quant_format: Any = "QOperator",
        op_types_to_quantize: Sequence[str] | None = None,
        quant_axes: Sequence[tuple[str, int]] | None = None,
        channel_wised_quantize: bool = False,
        algo_config: Any = None,
    ) -> None:
        self._model_argument = model
        # A configuration's own block size takes precedence over the argument, as in onnxruntime.
        size = getattr(algo_config, "block_size", block_size)
        if not isinstance(size, int) or size < 16 or size & (size - 1):
            raise UsageError(f"block_size is {size!r}", "Give a power of two, 16 or more")
        if not isinstance(model, onnx.ModelProto):
            model = load_model(path_of(model), external_data="all")
        # Both forms are kept: the path for edgeq's own preparation, and the model for onnxruntime's quantizer.
        self._source = model
        if algo_config is None:
            algo_config = _theirs().DefaultWeightOnlyQuantConfig(
                block_size=block_size,
                is_symmetric=is_symmetric,
                accuracy_level=accuracy_level,
                quant_format=member("QuantFormat", quant_format),
                op_types_to_quantize=tuple(op_types_to_quantize) if op_types_to_quantize else None,
                quant_axes=tuple(quant_axes) if quant_axes else None,
                bits=bits,
                channel_wised_quantize=channel_wised_quantize,
            )
        self.algo_config = algo_config
        self._arguments: dict[str, Any] = {
            "bits": bits,
            "block_size": block_size,
            "is_symmetric": is_symmetric,
            "accuracy_level": accuracy_level,
            "nodes_to_exclude": listed(nodes_to_exclude),
            "nodes_to_include": listed(nodes_to_include),
            "algo_config": algo_config,
        }
        self.model = quantization_tools("onnx_model").ONNXModel(model)

    def process(self) -> None:
        """Quantize the model.

        Raises:
            UsageError: onnxruntime's quantizer does not support these options.
            ModelError: the model is damaged, or the quantizer does not accept it.
            RuntimeUnavailableError: the algorithm needs a package that is not installed.
        """
        model = self._source
        if self._searches():
            with scratch_folder("edgeq-nbits-") as folder:
                model = self._in_searched_blocks(Path(folder))
            # `model` stays the object that a script already holds.
            self.model.model.CopyFrom(model)
            # What edgeq does not search, such as the tables of Gather, is left to onnxruntime's quantizer.
            other_types = set(self.algo_config.op_types_to_quantize) - {"MatMul"}
            if not other_types and not self._arguments["nodes_to_include"]:
                return
        try:
            named = "the model" if self._model_argument is self._source else str(self._model_argument)
            with refusals(named, "Keep the node in float with nodes_to_exclude, or choose other options"):
                quantizer = _theirs().MatMulNBitsQuantizer(model, **self._arguments)
                quantizer.process()
        # Some algorithms live in packages that onnxruntime does not install.
        except ImportError as error:
            algorithm = self.algo_config.algorithm
            raise RuntimeUnavailableError(
                f"the algorithm {algorithm} needs {error.name}, which is not installed", f"pip install {error.name}"
            ) from error
        except (AssertionError, NotImplementedError) as error:
            raise UsageError(f"onnxruntime's quantizer: {error}", "Choose other options") from error
        self.model = quantizer.model

    def _searches(self) -> bool:
        """Return whether edgeq, and not onnxruntime's quantizer, quantizes the matrix products with these options."""
        config = self.algo_config
        return (
            config.algorithm in _SEARCHED
            and config.quant_format.name == "QOperator"
            and "MatMul" in config.op_types_to_quantize
            and self._option_value("bits") in WEIGHT_BITS
            and self._option_value("block_size") in BLOCK_SIZES
            and not any(getattr(config, name, None) for name in _OWN_WAYS)
            # The search works along axis 0 alone.
            and dict(config.quant_axes or ()).get("MatMul", 0) == 0
            # 16-bit models are left to onnxruntime's own quantizer.
            and all(tensor.data_type not in _HALVES for tensor in self._source.graph.initializer)
            and any(node.op_type == "MatMul" for node in self._source.graph.node)
        )

    def _option_value(self, option: str) -> Any:
        """Return the value of an option from the configuration. If the configuration does not have the option, return
        the argument's value.
        """
        return getattr(self.algo_config, option, self._arguments[option])

    def _in_searched_blocks(self, folder: Path) -> onnx.ModelProto:
        prepared, level = as_given(self._model_argument, folder), self._option_value("accuracy_level")
        warn_unknown_nodes(prepared.model, self._arguments["nodes_to_exclude"])
        scheme = Scheme(
            mode="weight-only",
            weight_bits=self._option_value("bits"),
            block_size=self._option_value("block_size"),
            weight_symmetric=self._option_value("is_symmetric"),
            op_types=("MatMul",),
            exclude=tuple(self._arguments["nodes_to_exclude"]),
            # Level 4 computes the products in int8. Every other level must keep all of them in float.
            float_compute=() if level == INT8_LEVEL else (ALL_NODES,),
        )
        write_weight_only(prepared, scheme, folder / "blocks.onnx")
        return _with_level(load_model(folder / "blocks.onnx", external_data="all"), level)


def _with_level(model: onnx.ModelProto, level: int | None) -> onnx.ModelProto:
    """Set the accuracy level of all products and return `model`. With None, the kernels choose the level."""
    for node in model.graph.node:
        if node.op_type == OPERATOR:
            other_attributes = [attribute for attribute in node.attribute if attribute.name != LEVEL]
            level_attributes = [] if level is None else [onnx.helper.make_attribute(LEVEL, level)]
            # A protobuf list cannot be assigned, so it is emptied and filled again.
            del node.attribute[:]
            node.attribute.extend([*other_attributes, *level_attributes])
    return model


def in_blocks(model: ModelInput, output: Path, **options: Any) -> Written:
    """Quantize a model, check the result, and write it.

    Args:
        options: the options of `MatMulNBitsQuantizer`.

    Raises:
        ModelError: the model is damaged or is not accepted, or nothing in it was quantized.
        RuntimeUnavailableError: onnxruntime cannot open the result.
    """
    with output_file(output, force=True, beside=siblings(model, output)) as draft:
        quantizer = MatMulNBitsQuantizer(model, **options)
        quantizer.process()
        save_model(from_proto(quantizer.model.model), draft)
        return check_written(draft, output, ())


def _theirs() -> Any:
    return quantization_tools("matmul_nbits_quantizer")


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    options = ArgumentParser(
        "edgeq.compat.matmul_nbits_quantizer", description="Put weights into blocks of 4 or 8 bits."
    )
    options.add_argument("--input_model", type=Path, required=True, help="Float model.")
    options.add_argument("--output_model", type=Path, required=True, help="Quantized model; must not exist.")
    options.add_argument("--block_size", type=int, default=32, help="Number of weights that share a scale.")
    options.add_argument(
        "--quant_method", choices=[*_METHODS, "gptq", "nvidia_awq"], default="default", help="Algorithm."
    )
    options.add_argument("--bits", type=int, default=4, help="Bits per weight.")
    options.add_argument("--symmetric", type=_boolean, nargs="?", const=True, default=True, help="No zero points.")
    options.add_argument(
        "--accuracy_level", type=int, help="Type in which products are computed: 4 is int8, 1 is float32."
    )
    options.add_argument("-v", "--verbose", action="store_true", help="Accepted.")
    options.add_argument("--nodes_to_exclude", nargs="+", default=[], help="Nodes to keep in float.")
    options.add_argument("--nodes_to_include", nargs="+", help="Nodes to quantize, whatever their type.")
    options.add_argument(
        "--quant_format", choices=["QOperator", "QDQ"], default="QOperator", help="Format of the file."
    )
    options.add_argument(
        "--op_types_to_quantize", nargs="+", choices=["MatMul", "Gather"], help="Operator types. Default: MatMul."
    )
    options.add_argument("--quant_axes", type=_axis, nargs="+", help="OP_TYPE:AXIS, such as MatMul:0 Gather:1.")
    return options


def _boolean(text: str) -> bool:
    # As text, "False" would count as true.
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
    return values[text.lower()]


def _axis(text: str) -> tuple[str, int]:
    name, colon, axis = text.partition(":")
    if not colon or not axis.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not OP_TYPE:AXIS")
    return name, int(axis)


def run(arguments: Sequence[str]) -> str:
    """Run the command with the given arguments and return the line to print."""
    options = parser().parse_args(arguments)
    # The parser knows these names, so that the user learns what to type instead.
    if options.quant_method not in _METHODS:
        raise UsageError(
            f"--quant_method {options.quant_method} needs calibration samples, which this command does not take",
            f"Type `edgeq quantize {options.input_model} --weight-only 4 --recover weight-rounding "
            f"--data SAMPLES -o {options.output_model}`",
        )
    if options.output_model.exists():
        raise UsageError(f"{options.output_model} exists", "Choose another --output_model, or remove it")
    # The configurations of the other algorithms do not accept all options, and an unknown one raises TypeError.
    types = tuple(options.op_types_to_quantize or ("MatMul",))
    config: dict[str, Any] = {"op_types_to_quantize": types}
    if options.quant_method in ("default", "hqq"):
        config |= {"block_size": options.block_size, "bits": options.bits}
        config["quant_axes"] = tuple(options.quant_axes) if options.quant_axes else None
    if options.quant_method == "default":
        config |= {"is_symmetric": options.symmetric, "accuracy_level": options.accuracy_level}
        config["quant_format"] = member("QuantFormat", options.quant_format)
    result = in_blocks(
        options.input_model,
        options.output_model,
        bits=options.bits,
        block_size=options.block_size,
        is_symmetric=options.symmetric,
        accuracy_level=options.accuracy_level,
        nodes_to_exclude=options.nodes_to_exclude,
        nodes_to_include=options.nodes_to_include,
        algo_config=getattr(_theirs(), _METHODS[options.quant_method])(**config),
    )
    return f"{result.output}: {options.bits} bits, blocks of {options.block_size}"


main = partial(run_printed, run)

if __name__ == "__main__":
    run_program(main)
