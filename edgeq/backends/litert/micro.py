"""Write the files that a microcontroller project needs for a .tflite model.

The files are the model as a C array, the operators to register, the size of the arena, and a self-test. The self-test's
expected answers come from TFLite Micro's own kernels, run on this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeq.backends.litert.network import QUANTIZED, Port, TfliteNetwork
from edgeq.data.samples import Samples
from edgeq.errors import DataError, EngineError, RuntimeUnavailableError
from edgeq.measure.inference import infer
from edgeq.run.engines import Engine
from edgeq.run.session import Engines, SessionSettings

FOLDER = "micro"
ARENA = "arena_bytes"
"""Option that sets the size of the engine's arena. With this option, the engine does not enlarge the arena."""
_TEXTS = Path(__file__).parent / "micro_files"
# Steps of 1 KiB, up to 256 MiB: more than any microcontroller has.
_STEP, _MOST_STEPS = 1024, 1 << 18
# Each case is C text of about six bytes for each byte of data.
_MOST_CASES = 8
# Makes lines of 99 columns.
_PER_LINE = 16
# Names of TFLite Micro's methods that cannot be derived from the operator's name.
_METHODS = {"BATCH_MATMUL": "BatchMatMul", "PADV2": "PadV2"}


@dataclass(frozen=True)
class _Case:
    """Hold the inputs and outputs of one sample, in the types and axis orders of the file."""

    inputs: tuple[NDArray[Any], ...]
    outputs: tuple[NDArray[Any], ...]


def write_sources(
    name: str,
    network: TfliteNetwork,
    file: Path,
    engine: Engine,
    samples: Samples,
    folder: Path,
    *,
    count: int,
    arena: int,
    twin: str = "",
) -> dict[str, Path]:
    """Create `folder`, write the sources into it, and return their paths, keyed by their names in a bundle.

    Args:
        name: name of the model, for display.
        network: the network that the file contains.
        file: the .tflite file, which has integer inputs and outputs.
        engine: TFLite Micro.
        count: number of `samples` that become the self-test.
        arena: size of the interpreter's arena in bytes, see `arena_bytes`.
        twin: a sentence on the compiled form that ships with the file; "" if there is no such form.

    Raises:
        RuntimeUnavailableError: TFLite Micro is not installed.
        EngineError: TFLite Micro cannot run the file.
        DataError: there is no sample.
    """
    folder.mkdir(parents=True)
    cases = _cases(network, file, engine, samples, min(count, _MOST_CASES))
    kinds = sorted({operator.kind for operator in network.operators})
    readme = {
        "NAME": name,
        "BYTES": f"{file.stat().st_size:,}",
        "OPERATORS": ", ".join(kinds),
        "CASES": str(len(cases)),
        "ARENA": f"{arena:,}",
        "TWIN": f"\n{twin}\n" if twin else "",
        "PORTS": _ports(network),
    }
    texts = {
        "model.h": _model_header(arena),
        "model.cc": f'#include "model.h"\n\n{_array("kEdgeqModel", file.read_bytes(), alignment=16)}',
        "operators.h": _operators(kinds),
        "selftest.h": _selftest_header(network, len(cases)),
        "selftest.cc": _selftest(cases),
        "main.cc": (_TEXTS / "main.cc").read_text("utf-8"),
        "README.md": _filled((_TEXTS / "README.md").read_text("utf-8"), readme),
    }
    for file_name, text in texts.items():
        (folder / file_name).write_text(text, encoding="utf-8")
    return {f"{FOLDER}/{file_name}": folder / file_name for file_name in texts}


def resolver_method(kind: str) -> str:
    """Return the name of the method with which TFLite Micro's resolver registers an operator: AddConv2D for CONV_2D."""
    camel_case = "".join(part if part[0].isdigit() else part.capitalize() for part in kind.split("_"))
    return f"Add{_METHODS.get(kind, camel_case)}"


def arena_bytes(file: Path, engine: Engine) -> int:
    """Return the size in bytes, in steps of 1 KiB, of the smallest arena in which TFLite Micro's interpreter can
    prepare the file. It is found by trying, because only the interpreter knows how it plans its memory.

    Raises:
        EngineError: even an arena of 256 MiB is too small.
    """
    with Engines() as engines:

        def opens(steps: int) -> bool:
            options = {**engine.options, ARENA: str(_STEP * steps)}
            try:
                engines.open(file, SessionSettings(engine=replace(engine, options=options))).close()
            except (EngineError, RuntimeUnavailableError):
                return False
            return True

        # Doubling finds an upper bound in few starts, and halving the interval then finds the smallest size.
        sufficient = 1
        while not opens(sufficient):
            sufficient *= 2
            if sufficient > _MOST_STEPS:
                raise EngineError(
                    f"TFLite Micro cannot prepare {file.name} in an arena of 256 MiB", "Use a smaller model"
                )
        too_small = sufficient // 2
        while sufficient - too_small > 1:
            middle = (sufficient + too_small) // 2
            too_small, sufficient = (too_small, middle) if opens(middle) else (middle, sufficient)
    return _STEP * sufficient


def _cases(network: TfliteNetwork, file: Path, engine: Engine, samples: Samples, count: int) -> list[_Case]:
    """Return the file's inputs and outputs for the first `count` samples. They are encoded here, because a session of
    `engine` takes and returns floats.
    """
    with Engines() as engines:
        session = engines.open(file, SessionSettings(engine=engine))
        first_samples = list(itertools.islice(samples, count))
        if not first_samples:
            raise DataError(f"{samples.source} has no samples", "Give at least one")
        cases = []
        for sample in first_samples:
            # The file has batch 1.
            single = replace(sample, inputs={name: np.asarray(value)[:1] for name, value in sample.inputs.items()})
            outputs = infer(session, single)
            inputs = tuple(encoded(port, single.inputs[port.name]) for port in network.inputs)
            cases.append(_Case(inputs, tuple(encoded(port, outputs[port.name]) for port in network.outputs)))
    return cases


def encoded(port: Port, array: NDArray[Any]) -> NDArray[Any]:
    """Convert an array of the model to the type, scale and axis order of the file's tensor, and return it."""
    scales = port.tensor.scales
    if port.tensor.type in QUANTIZED and scales is not None:
        limits = np.iinfo(port.tensor.type)
        steps = np.rint(array.astype(np.float32) / scales.scale[0]) + scales.zero[0]
        array = np.clip(steps, limits.min, limits.max)
    return np.ascontiguousarray(array.transpose(port.order).astype(port.tensor.type))


def _filled(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def _ports(network: TfliteNetwork) -> str:
    rows = ["| | type | shape | order | scale | zero point |", "|---|---|---|---|---|---|"]
    for kind, ports in (("input", network.inputs), ("output", network.outputs)):
        for place, port in enumerate(ports):
            tensor = port.tensor
            scale, zero = (
                ("", "") if tensor.scales is None else (repr(float(tensor.scales.scale[0])), tensor.scales.zero[0])
            )
            rows.append(
                f"| {kind} {place} | {tensor.type} | {list(tensor.shape)} | {list(port.order)} | {scale} | {zero} |"
            )
    return "\n".join(rows)


def _model_header(arena: int) -> str:
    return (
        "// The model, and the memory that TFLite Micro's interpreter needs for it.\n#pragma once\n\n"
        f"constexpr int kEdgeqArenaBytes = {arena};\n"
        "extern const unsigned char kEdgeqModel[];\n"
    )


def _operators(kinds: Sequence[str]) -> str:
    lines = "".join(f"  if (resolver.{resolver_method(kind)}() != kTfLiteOk) return kTfLiteError;\n" for kind in kinds)
    return (
        "// Exactly the operators that the model needs.\n#pragma once\n\n"
        '#include "tensorflow/lite/micro/micro_mutable_op_resolver.h"\n\n'
        # The resolver may be in either namespace, so the generated code opens both.
        "namespace tflite {\nnamespace micro {}\n}  // namespace tflite\n\n"
        "namespace edgeq_names {\nusing namespace tflite;\nusing namespace tflite::micro;\n"
        f"using Resolver = MicroMutableOpResolver<{len(kinds)}>;\n\n"
        f"inline TfLiteStatus Register(Resolver& resolver) {{\n{lines}  return kTfLiteOk;\n}}\n"
        "}  // namespace edgeq_names\n\n"
        "using EdgeqResolver = edgeq_names::Resolver;\n"
        "#define EdgeqRegister edgeq_names::Register\n"
    )


def _selftest_header(network: TfliteNetwork, cases: int) -> str:
    inputs, outputs = len(network.inputs), len(network.outputs)
    return (
        "// Inputs, and the outputs that TFLite Micro's portable kernels give, byte by byte.\n#pragma once\n\n"
        "#include <cstddef>\n\n"
        f"constexpr int kEdgeqCases = {cases};\n"
        f"constexpr size_t kEdgeqInputs = {inputs};\nconstexpr size_t kEdgeqOutputs = {outputs};\n\n"
        "struct EdgeqTensor {\n  const unsigned char* data;\n  size_t bytes;\n};\n\n"
        "struct EdgeqCase {\n  EdgeqTensor inputs[kEdgeqInputs];\n  EdgeqTensor outputs[kEdgeqOutputs];\n};\n\n"
        "extern const EdgeqCase kEdgeqSelfTest[kEdgeqCases];\n"
    )


def _selftest(cases: Iterable[_Case]) -> str:
    arrays, rows = [], []
    for number, case in enumerate(cases):
        row = []
        for kind, tensors in (("input", case.inputs), ("output", case.outputs)):
            named = {f"{kind}_{number}_{place}": tensor.tobytes() for place, tensor in enumerate(tensors)}
            arrays += [f"{_array(name, data, alignment=4)}\n" for name, data in named.items()]
            row.append("{" + ", ".join(f"{{{name}, sizeof({name})}}" for name in named) + "}")
        rows.append("    {" + ", ".join(row) + "},\n")
    table = f"const EdgeqCase kEdgeqSelfTest[kEdgeqCases] = {{\n{''.join(rows)}}};\n"
    return f'#include "selftest.h"\n\n{"".join(arrays)}{table}'


def _array(name: str, data: bytes, *, alignment: int) -> str:
    lines = (data[at : at + _PER_LINE] for at in range(0, len(data), _PER_LINE))
    body = "".join("    " + ", ".join(f"0x{byte:02x}" for byte in line) + ",\n" for line in lines)
    return f"alignas({alignment}) const unsigned char {name}[] = {{\n{body}}};\n"
