"""Wrap a compiled file in an EPContext node, the ONNX form of compiled models.

So a compiled file ships like the model of any other variant, with the names, types and shapes of its inputs and
outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import onnx
from edgeq_device.engines.direct_rknn import SIGNATURE, SOURCE
from onnx import helper

from edgeq.signature import Signature, TensorSpec


def write_context(compiled: Path, signature: Signature, platform: str, version: str, destination: Path) -> None:
    """Write an ONNX file that contains the file `compiled`.

    Args:
        signature: signature of the model that was compiled; its sizes are fixed.
        platform: the compiler's name for the chip.
        version: version of the compiler.
    """
    # ONNX Runtime's own form of compiled models, so a tool that shows ONNX files shows this one too.
    node = helper.make_node(
        "EPContext",
        [spec.name for spec in signature.inputs],
        [spec.name for spec in signature.outputs],
        name="compiled",
        domain="com.microsoft",
        main_context=1,
        # The bytes are inside the node, so a variant is one file.
        embed_mode=1,
        ep_cache_context=compiled.read_bytes(),
        ep_sdk_version=version,
        hardware_architecture=platform,
        source=SOURCE,
    )
    graph = helper.make_graph(
        [node], "compiled", [_info(spec) for spec in signature.inputs], [_info(spec) for spec in signature.outputs]
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13), helper.make_opsetid("com.microsoft", 1)], ir_version=8
    )
    toolchain = {"platform": platform, "compiler": version}
    record = {**toolchain, "inputs": _listed(signature.inputs), "outputs": _listed(signature.outputs)}
    # The runner reads the signature from this entry.
    entry = model.metadata_props.add()
    entry.key, entry.value = SIGNATURE, json.dumps(record, sort_keys=True)
    destination.write_bytes(model.SerializeToString(deterministic=True))


def _info(spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(spec.name, _type(spec), list(spec.shape or ()))


def _type(spec: TensorSpec) -> int:
    return int(helper.np_dtype_to_tensor_dtype(spec.dtype))


def _listed(specs: tuple[TensorSpec, ...]) -> list[Mapping[str, object]]:
    return [{"name": s.name, "dtype": str(s.dtype), "shape": list(s.shape or ())} for s in specs]
