"""Find out what each onnxruntime release can run: `python scripts/probe_runtime.py 1.16.3 1.24.4 ...`

pip installs each release into its own environment in a temporary folder. In each environment, the script loads one
model per operator, and models of every IR version and opset. It runs the models whose outputs are known
(probe_answers.py). It prints the results in the form of targets/onnxruntime/versions.toml. Redirect the output to that
file. It prints wrong outputs as comments. Add these to targets/onnxruntime/known_wrong.toml, with the hardware on which
they occur. Without versions, the script probes the onnxruntime of this interpreter.

`--models DIR` only writes the models. `--inside DIR` only loads them, and needs only onnxruntime and numpy. So it also
works on a device or under emulation (`qemu-aarch64 ... python probe_runtime.py --inside DIR`). Add the JSON that it
prints to the results with `--add ARCHITECTURE=FILE`.

`--known-wrong` prints which entries of targets/onnxruntime/known_wrong.toml a release mends, and which entries cannot
be tried on this machine. With `--inside DIR`, it also works on a device or under emulation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LAST_NUMPY_1 = (1, 18)
_IRS, _OPSETS = range(7, 16), range(11, 30)
_PAIRS = (("uint8", "uint8"), ("uint8", "int8"), ("int8", "int8"), ("int8", "uint8"))
_SHORT = {"uint8": "u8", "int8": "s8", "uint16": "u16", "int16": "s16", "uint4": "u4", "int4": "s4"}
# The models that contain a kind of integer product, as edgeq_device names it.
_OPERATORS = {
    "Conv": ("ConvInteger", "QLinearConv"),
    "MatMul": ("MatMulInteger", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat"),
}
_RUNTIME = Path(__file__).resolve().parents[1] / "targets" / "runtime"
_UNARY = ("QLinearSigmoid", "QLinearLeakyRelu", "QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearSoftmax")


def main() -> None:
    """Probe the releases that the command line names, and print the results as TOML."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="onnxruntime releases")
    parser.add_argument("--models", type=Path, help="write the models here and stop")
    parser.add_argument("--inside", type=Path, help="load the models in this folder and print JSON")
    parser.add_argument(
        "--add",
        action="append",
        default=[],
        metavar="ARCHITECTURE=FILE",
        help="add a JSON file of --inside to the results",
    )
    parser.add_argument("--known-wrong", action="store_true", help="try the entries of known_wrong.toml")
    given = parser.parse_args()
    if given.inside is not None:
        found = load_all(given.inside)
        print("\n".join(judge_entries([found])) if given.known_wrong else json.dumps(found))
        return
    if given.models is not None:
        write_models(given.models)
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="edgeq-probe-") as name:
        folder = Path(name)
        write_models(folder / "models")
        for version in given.versions:
            results.append((_architecture(), _probe(version, folder)))
        if not given.versions:
            results.append((_architecture(), load_all(folder / "models")))
    if given.known_wrong:
        print("\n".join(judge_entries([found for _, found in results])))
        return
    for entry in given.add:
        architecture, _, file = entry.partition("=")
        results.append((architecture, json.loads(Path(file).read_text())))
    print(as_toml(results))


def judge_entries(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each entry of known_wrong.toml: whether the releases of `runs` still have the fault on this
    machine, or why it cannot be tried here.
    """
    if str(_RUNTIME) not in sys.path:
        sys.path.insert(0, str(_RUNTIME))
    from edgeq_device.engines.catalog import load_wrong_kernels
    from edgeq_device.system.features import read_features

    architecture, features = read_features()
    for row in load_wrong_kernels():
        lacks = [row.architecture] if row.architecture != architecture else []
        lacks += [feature for feature in row.features if feature not in features]
        has = [feature for feature in row.without if feature in features]
        if lacks or has:
            reason = f"needs {' and '.join(lacks)}" if lacks else f"needs a CPU without {' and '.join(has)}"
            yield f"{row.source}: cannot be tried here: {reason}"
        else:
            yield f"{row.source}: {_judge_entry(row, runs)}"


def _judge_entry(row: Any, runs: list[dict[str, Any]]) -> str:
    names = [name for kind in row.products for name in _list_models(kind)]
    wrong = {}
    for run in sorted(runs, key=lambda run: _key(run[""])):
        # An older release may not load a model. It then gives no answer to judge.
        answers = [run[name] for name in names if isinstance(run.get(name), list)]
        if answers:
            wrong[run[""]] = any(answers)
    if not wrong:
        return "cannot be tried here: no release loads a model with these products"
    *_, newest = wrong
    faulty = [version for version, fault in wrong.items() if fault]
    mended = next((version for version in wrong if faulty and _key(version) > _key(faulty[-1])), row.before or newest)
    verdict = "still wrong" if wrong[newest] else f"mended in {mended}"
    results = ", ".join(f"{version} {'wrong' if fault else 'right'}" for version, fault in wrong.items())
    other = [version for version, fault in wrong.items() if row.in_release(version) != fault]
    advice = f"; the table's `since` or `before` is wrong for {', '.join(other)}" if other else ""
    return f"{verdict} ({results}){advice}"


def _list_models(kind: str) -> list[str]:
    """Return the models that contain a kind of product, such as "MatMul s8s8 with -128"."""
    operator, types, *special = kind.split(" ", 2)
    if types == "f32":
        return [f"answer {kind}"]
    suffix = " extreme" if special == ["with -128"] else ""
    return [f"answer {name} {types}{suffix}" for name in _OPERATORS[operator]]


def load_all(folder: Path) -> dict[str, Any]:
    """Load each model with this interpreter's onnxruntime. Return a dictionary of model name → whether the model loads,
    and "" → the version of onnxruntime.

    For a model that loads and has known outputs, the value is the list of the shapes with wrong outputs.
    """
    import onnxruntime

    found: dict[str, Any] = {"": onnxruntime.__version__}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for path in sorted(folder.glob("*.onnx")):
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            answers = path.with_suffix(".npz")
            found[path.stem] = _wrong(session, answers) if answers.is_file() else True
        except Exception:  # an exception of any type is a result
            found[path.stem] = False
    return found


def _wrong(session: Any, answers: Path) -> list[str]:
    """Return the shapes of the inputs whose outputs differ from those in the file. Floats may differ by as much as a
    different order of summation changes them.
    """
    import numpy as np

    with np.load(answers) as file:
        known = {name: file[name] for name in file.files}
    inputs = {value.name: known[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    wrong = []
    for name, given in zip(names, session.run(names, inputs), strict=True):
        wanted = known[name]
        close = {"rtol": 1e-3, "atol": 0.5} if wanted.dtype.kind == "f" else {"rtol": 0, "atol": 0}
        if not np.allclose(given.astype(float), wanted.astype(float), **close):
            wrong.append("x".join(map(str, known["x" + name[1:]].shape)))
    return wrong


def write_models(folder: Path) -> None:
    """Write one model for each operator with each pair of types ("ConvInteger u8s8.onnx"), for each IR version ("ir
    9.onnx"), and for each opset.
    """
    from onnx import helper
    from probe_answers import write_answers  # imported here because --inside does not need onnx, which may be missing

    folder.mkdir(parents=True, exist_ok=True)
    write_answers(folder)
    for ir in _IRS:
        _save(folder / f"ir {ir}.onnx", helper.make_node("Identity", ["x"], ["y"]), ir=ir)
    for opset in _OPSETS:
        _save(folder / f"opset {opset}.onnx", helper.make_node("Identity", ["x"], ["y"]), opset=opset)
    for a, b in _PAIRS:
        pair = _SHORT[a] + _SHORT[b]
        quantized = {"as": 0.1, "az": (a, 0), "b": (b, [[1, 1], [1, 1]]), "bs": 0.1, "bz": (b, 0), "ys": 0.1}
        _one(folder, f"QLinearMatMul {pair}", "QLinearMatMul", a, [2, 2], {**quantized, "yz": (a, 0)}, a)
        conv = {**quantized, "b": (b, [[[[1]]]]), "yz": (a, 0)}
        _one(folder, f"QLinearConv {pair}", "QLinearConv", a, [1, 1, 2, 2], conv, a)
        gemm = {**quantized, "c": ("int32", [0, 0]), "yz": (a, 0)}
        gemm = {key: gemm[key] for key in ("as", "az", "b", "bs", "bz", "c", "ys", "yz")}
        _one(folder, f"QGemm {pair}", "QGemm", a, [2, 2], gemm, a, contrib=True)
        _one(folder, f"MatMulInteger {pair}", "MatMulInteger", a, [2, 2], {"b": quantized["b"]}, "int32")
        _one(folder, f"ConvInteger {pair}", "ConvInteger", a, [1, 1, 2, 2], {"b": (b, [[[[1]]]])}, "int32")
        scaled = {key: quantized[key] for key in ("b", "as", "bs", "az", "bz")}
        _one(folder, f"MatMulIntegerToFloat {pair}", "MatMulIntegerToFloat", a, [2, 2], scaled, "float", contrib=True)
    for b in ("uint8", "int8"):
        weight = {"b": (b, [[1, 1], [1, 1]]), "bs": 0.1}
        name = f"DynamicQuantizeMatMul {_SHORT[b]}"
        _one(folder, name, "DynamicQuantizeMatMul", "float", [2, 2], weight, "float", contrib=True)
    for a in ("uint8", "int8"):
        both = {"as": 0.1, "az": (a, 0), "b": (a, [1, 1]), "bs": 0.1, "bz": (a, 0), "ys": 0.1, "yz": (a, 0)}
        for op in ("QLinearAdd", "QLinearMul"):
            _one(folder, f"{op} {_SHORT[a]}", op, a, [2, 2], both, a, contrib=True)
        for op in _UNARY:
            extra = {"QLinearAveragePool": {"kernel_shape": [1, 1]}, "QLinearSoftmax": {"opset": 13}}.get(op, {})
            values = {"as": 0.1, "az": (a, 0), "ys": 0.1, "yz": (a, 0)}
            _one(folder, f"{op} {_SHORT[a]}", op, a, [1, 1, 2, 2], values, a, contrib=True, **extra)
        _concat(folder, a)
    for kind, opset in (("uint8", 13), ("int8", 13), ("uint16", 21), ("int16", 21), ("uint4", 21), ("int4", 21)):
        zero = {"s": 0.1, "z": (kind, 0)}
        _one(folder, f"QuantizeLinear {_SHORT[kind]}", "QuantizeLinear", "float", [2], zero, kind, opset=opset)
        name = f"DequantizeLinear {_SHORT[kind]}"
        _one(folder, name, "DequantizeLinear", kind, [2], zero, "float", opset=opset)
        name += " contrib"
        _one(folder, name, "DequantizeLinear", kind, [2], zero, "float", contrib=True)
    for bits in (4, 8):
        _nbits(folder, bits)
        _gather(folder, bits)


def _one(
    folder: Path, name: str, op: str, kind: str, shape: list[int], values: dict[str, Any], out: str,
    *, contrib: bool = False, opset: int = 17, **attributes: Any,
) -> None:  # fmt: skip
    from onnx import helper

    constants = [_constant(key, value) for key, value in values.items()]
    domain = "com.microsoft" if contrib else ""
    if op == "QLinearSoftmax":
        attributes = {"opset": 13}
    node = helper.make_node(op, ["x", *values], ["y"], domain=domain, **attributes)
    _save(folder / f"{name}.onnx", node, kind, shape, constants, out, opset=opset)


def _concat(folder: Path, kind: str) -> None:
    from onnx import helper

    constants = [_constant(key, value) for key, value in {"ys": 0.1, "yz": (kind, 0), "s": 0.1, "z": (kind, 0)}.items()]
    node = helper.make_node("QLinearConcat", ["ys", "yz", "x", "s", "z"], ["y"], domain="com.microsoft", axis=0)
    _save(folder / f"QLinearConcat {_SHORT[kind]}.onnx", node, kind, [2, 2], constants, kind)


def _nbits(folder: Path, bits: int) -> None:
    from onnx import helper

    blob = [[[0] * (32 * bits // 8)]] * 32
    constants = [_constant("b", ("uint8", blob)), _constant("s", ("float", [0.1] * 32))]
    node = helper.make_node(
        "MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", K=32, N=32, bits=bits, block_size=32
    )
    _save(folder / f"MatMulNBits {bits}.onnx", node, "float", [1, 32], constants, "float")


def _gather(folder: Path, bits: int) -> None:
    from onnx import helper

    integers, zeros = [[0] * (64 * bits // 8)] * 4, [[0] * (bits // 4)] * 4
    rows = {"b": ("uint8", integers), "s": [[0.1, 0.1]] * 4, "z": ("uint8", zeros)}
    how = {"gather_axis": 0, "quantize_axis": 1, "block_size": 32, "bits": bits}
    node = helper.make_node("GatherBlockQuantized", ["b", "x", "s", "z"], ["y"], domain="com.microsoft", **how)
    constants = [_constant(key, value) for key, value in rows.items()]
    _save(folder / f"GatherBlockQuantized {bits}.onnx", node, "int64", [1], constants, "float")


def _constant(name: str, value: Any) -> Any:
    import numpy as np
    from onnx import TensorProto, helper

    kind, data = value if isinstance(value, tuple) else ("float", value)
    array = np.array(data)
    return helper.make_tensor(name, getattr(TensorProto, kind.upper()), array.shape, array.ravel().tolist())


def _save(
    path: Path, node: Any, kind: str = "float", shape: Any = (1,), constants: Any = (), out: str = "float",
    *, ir: int = 8, opset: int = 17,
) -> None:  # fmt: skip
    from onnx import TensorProto, helper

    types = [getattr(TensorProto, name.upper()) for name in (kind, out)]
    graph = helper.make_graph(
        [node],
        "probe",
        [helper.make_tensor_value_info("x", types[0], shape)],
        [helper.make_tensor_value_info("y", types[1], None)],
        list(constants),
    )
    # A newer opset may need a newer IR version. 4-bit types came with IR 10.
    needed = 10 if "4" in kind + out or opset >= 21 else ir
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=max(ir, needed) if opset >= 21 else ir)
    path.write_bytes(model.SerializeToString())


def _probe(version: str, folder: Path) -> dict[str, Any]:
    place = folder / version
    venv.create(place, with_pip=True)
    python = str(place / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    old = tuple(int(part) for part in version.split(".")[:2]) <= _LAST_NUMPY_1
    install = [python, "-I", "-m", "pip", "install", "--quiet", "--only-binary=:all:", f"onnxruntime=={version}"]
    subprocess.run([*install, *(["numpy<2"] if old else [])], check=True, stdout=sys.stderr)
    inside = [python, "-I", str(Path(__file__).resolve()), "--inside", str(folder / "models")]
    found: dict[str, Any] = json.loads(subprocess.run(inside, check=True, capture_output=True, text=True).stdout)
    wrong = sum(bool(answer) for name, answer in found.items() if name.startswith("answer "))
    print(f"{version}: {sum(v is not False for v in found.values())} of {len(found)}, {wrong} wrong", file=sys.stderr)
    return found


def _architecture() -> str:
    import platform

    named = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(named, named)


def as_toml(found: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the results in the form of targets/onnxruntime/versions.toml. For every architecture and model, the text
    names the oldest probed release since which every release has loaded the model.
    """
    by_architecture: dict[str, list[dict[str, Any]]] = {}
    for architecture, findings in found:
        by_architecture.setdefault(architecture, []).append(findings)
    lines = [
        "# What releases of onnxruntime can load. scripts/probe_runtime.py tested them and wrote this file.",
        "# opset, ir: the highest that each release reads. kernels: the oldest of the tested releases that loads an",
        '# operator with these types of its activation and its weight, as all later ones do; "" if there is none.',
        "",
    ]
    lines.append("[probed]")
    for architecture, runs in sorted(by_architecture.items()):
        runs.sort(key=lambda run: _key(run[""]))
        lines.append(f"{architecture} = {json.dumps([run[''] for run in runs])}")
    lines.append("")
    for architecture, runs in sorted(by_architecture.items()):
        since = {name: _since(name, runs) for name in runs[0] if name}
        for kind in ("opset", "ir"):
            lines.append(f"[{kind}.{architecture}]")
            for run in runs:
                known = [int(name.split()[1]) for name, loads in run.items() if loads and name.startswith(f"{kind} ")]
                lines.append(f'"{_minor(run[""])}" = {max(known)}')
            lines.append("")
        lines.append(f"[kernels.{architecture}]")
        for name, version in sorted(since.items()):
            if not name.startswith(("opset ", "ir ", "answer ")):
                lines.append(f'"{name}" = "{version}"')
        for run in runs:
            for name, wrong in sorted(run.items()):
                if name.startswith("answer ") and wrong:
                    lines.append(f"# {run['']}: wrong {name}: {', '.join(wrong)}")
        lines.append("")
    return "\n".join(lines)


def _since(name: str, runs: list[dict[str, Any]]) -> str:
    """Return the oldest release since which every release has loaded `name`. Return "" if the newest release does not
    load it.
    """
    first = ""
    for run in runs:
        if not run.get(name):
            first = ""
        elif not first:
            first = _minor(run[""])
    return first


def _key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


if __name__ == "__main__":
    main()
