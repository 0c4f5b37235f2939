"""Run each operator alone in the simulator of Qualcomm's NPU. Write whether the NPU supports the operator and how exact
the outputs are.

    python scripts/probe_qnn.py --arch 68 73 -o targets/qnn/htp.toml --rules targets/backends/qnn.toml

An operator is "taken" if the engine reports that it runs the operator's node. The outputs are compared with those of
the reference arithmetic, which is the same Q/DQ file on ONNX Runtime's CPU kernels without optimisation.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from edgeq_device.engines.catalog import read_installed_version

from edgeq.backends.qnn.backend import write_pairs
from edgeq.calibration.collect import collect
from edgeq.calibration.ranges import derive_ranges
from edgeq.data.samples import open_samples
from edgeq.errors import EdgeqError
from edgeq.measure.node_runs import find_source_name
from edgeq.measure.power_ratios import decibels
from edgeq.model.int8_rules import DEFAULT, Int8Rule
from edgeq.model.prepare import prepare_model
from edgeq.run.engines import find_backend_engine
from edgeq.run.session import Engines, SessionSettings, onnxruntime, open_session
from edgeq.scheme import Scheme
from edgeq.util.folders import shipped

CASES = shipped("targets") / "qnn" / "operators.txt"
SAMPLES = 4
# SQNR in dB that remains if there are errors of one or two steps of the output's scale.
LEAST_DB = 26.0
UINT8: Mapping[str, Any] = {"weight_type": "uint8", "weight_symmetric": False, "per_channel": False}
"""Scheme in which constants have the type of the activations instead of int8 with one scale per channel."""
# (bits of the activations, type of the constants).
KINDS = ((8, "int8"), (16, "int8"), (8, "uint8"))


@dataclass(frozen=True)
class Case:
    """Describe one operator in one form.

    Attributes:
        graph: the graph in ONNX's text form. Inputs named "x..." are fed, and all other inputs are constants. Constants
            named "p..." are positive. Constants named "v..." are positive and span several orders of magnitude.
    """

    operator: str
    form: str
    graph: str

    @property
    def has_constants(self) -> bool:
        """Return whether the graph has float constants."""
        inputs = self.graph.partition("=>")[0]
        return bool(re.search(r"\] [^x]", inputs))


@dataclass(frozen=True)
class Answer:
    """Describe the engine's result for a case.

    Attributes:
        taken: whether all nodes of the case run in the engine.
        problem: the reason why the case is not taken, if the engine gives one.
        db: SQNR of the engine's outputs against the reference arithmetic, in dB.
        float_db: SQNR of the reference arithmetic against float32, in dB.
        steps: largest difference in steps of the output's range, which has 255 or 65535 steps.
    """

    taken: bool
    problem: str = ""
    db: float = 0.0
    float_db: float = 0.0
    steps: float = 0.0

    @property
    def right(self) -> bool:
        """Return whether the outputs differ from the reference arithmetic only by rounding. This is so if they are
        about as close to the reference as the reference is to float32, or if they are close in absolute terms.
        """
        return self.taken and self.db >= min(LEAST_DB, self.float_db - 1)


def read_cases(path: Path = CASES) -> tuple[Case, ...]:
    """Return the cases in a file. Each case begins with "Operator, form:", and its graph is on the lines below."""
    blocks = re.split(r"^(\w+), (.+):$", path.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return tuple(Case(o, f, g.strip()) for o, f, g in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True))


def ask(case: Case, bits: int, engine: Any, engines: Engines, folder: Path, **scheme: Any) -> Answer:
    """Quantize `case`, run it in `engine` and on the CPU, and compare the outputs."""
    random = np.random.default_rng(len(case.graph))
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]>\n{case.graph}')
    fed = {}
    for value in list(model.graph.input):
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        if value.name.startswith("x"):
            fed[value.name] = random.normal(size=(SAMPLES, *shape)).astype(np.float32)
            continue
        model.graph.input.remove(value)
        array = random.normal(scale=0.3, size=shape)
        if value.name.startswith("p"):  # positive values
            array = np.abs(array) + 0.5
        if value.name.startswith("v"):  # values over several orders of magnitude, like variances
            array = np.exp(10 * array)
        array = array.astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    file, quantized = folder / "float.onnx", folder / "quantized.onnx"
    onnx.save(model, file)
    prepared = prepare_model(file, folder / "work", simplify=False)
    feeds = [{name: array[i] for name, array in fed.items()} for i in range(SAMPLES)]
    samples = open_samples(feeds, prepared.signature)
    ranges = derive_ranges(collect(prepared.model, samples, model_digest=prepared.digest), "minmax")
    types = {node.op_type for node in prepared.model.graph}
    rules = {name: Int8Rule(True, "", "", "") for name in (*types, DEFAULT)}
    wanted = Scheme(wide=("*",) if bits == 16 else (), **scheme)
    try:
        write_pairs(prepared, ranges, wanted, quantized, rules)
    except EdgeqError as error:
        return Answer(False, f"cannot be quantized: {error}")
    nodes = {str(node.name) for node in prepared.model.graph if node.op_type != "Constant"}
    kept = {node.name for node in onnx.load(quantized).graph.node}
    try:
        assigned = engines.assigned_nodes(engine, quantized)
        missing = (nodes & kept).difference(find_source_name(name, nodes) for names in assigned for name in names)
        if missing:
            return Answer(False, "left to the CPU")
        there = engines.open(quantized, SessionSettings(engine=engine))
        found = [there.run(None, feed) for feed in feeds]
    except EdgeqError as error:
        return Answer(False, " ".join(str(error).split())[:300])
    here = open_session(quantized, SessionSettings(optimization="none"))
    right = open_session(prepared.path)
    sums = np.zeros(4)
    for feed, answers in zip(feeds, found, strict=True):
        for got, known, exact in zip(answers, here.run(None, feed), right.run(None, feed), strict=True):
            got, known, exact = (a.astype(np.float64) for a in (got, known, exact))
            span = max(np.ptp(known), 1e-9) / (2**bits - 1)
            sums += [(known**2).sum(), ((got - known) ** 2).sum(), ((known - exact) ** 2).sum(), 0]
            sums[3] = max(sums[3], np.abs(got - known).max() / span)
    return Answer(True, "", _db(sums[0], sums[1]), _db(sums[0], sums[2]), float(sums[3]))


def _db(signal: float, noise: float) -> float:
    return min(99.0, decibels(signal, noise)) if noise else 99.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table and, if requested, the rules that follow from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="*", default=["73"], help="Hexagon architectures to probe.")
    parser.add_argument("--only", nargs="*", help="Operator types.")
    parser.add_argument("-o", "--output", type=Path, help="Path of the table. [default: print it]")
    parser.add_argument("--rules", type=Path, help="Path of the backend's int8 rules.")
    given = parser.parse_args(arguments)
    cases = [case for case in read_cases() if not given.only or case.operator in given.only]
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, Engines() as engines:
        for number, (case, (bits, weights)) in enumerate(itertools.product(cases, KINDS)):
            if weights == "uint8" and not case.has_constants:
                continue
            found: dict[str, Answer] = {}
            for arch in given.arch:
                engine = find_backend_engine("qnn", {"htp_arch": arch})
                folder = Path(name) / f"{number}-{arch}"
                folder.mkdir()
                found[arch] = ask(case, bits, engine, engines, folder, **(UINT8 if weights == "uint8" else {}))
                print(f"{case.operator} {case.form} {bits} {weights} v{arch}: {found[arch]}", file=sys.stderr)
            lines.append(line(case, bits, weights, found))
    text = table(lines)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    else:
        print(text)
    if given.rules:
        given.rules.write_text(rules(lines), encoding="utf-8")
    return 0


def line(case: Case, bits: int, weights: str, found: Mapping[str, Answer]) -> dict[str, Any]:
    """Return a row of the table, which contains one result and the architectures that gave it."""
    first = next(iter(found.values()))
    taken = [arch for arch, answer in found.items() if answer.taken]
    row: dict[str, Any] = {"operator": case.operator, "form": case.form, "bits": bits, "weights": weights}
    row["taken_by"] = taken
    if taken:
        best = found[taken[0]]
        row |= {"right": best.right, "db": round(best.db, 1), "arithmetic_db": round(best.float_db, 1)}
        row["steps"] = round(best.steps, 1)
    else:
        row["problem"] = first.problem
    return row


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table as TOML."""
    rows = "\n".join("  { " + ", ".join(f"{k} = {_value(v)}" for k, v in row.items()) + " }," for row in lines)
    return _HEAD.format(version=version()) + f"line = [\n{rows}\n]\n"


def version() -> str:
    """Return the versions of the tools that were probed."""
    found = read_installed_version(find_backend_engine("qnn", {}))
    return f"onnxruntime-qnn {found}, onnxruntime {onnxruntime().__version__}, simulator on Linux x86-64"


def rules(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the backend's int8 rules. An operator has a rule if its first (plain) form is taken and its outputs are
    correct in 8 bits. In the rule, constants are int8, or uint8 if only uint8 is taken.
    """
    first: dict[str, Mapping[str, Any]] = {}
    for row in lines:
        if row["bits"] == 8:
            known = first.setdefault(row["operator"], row)
            if row["form"] == known["form"] and row.get("right") and not known.get("right"):
                first[row["operator"]] = row
    groups: dict[tuple[str, str], list[str]] = {}
    for operator, row in first.items():
        if row.get("right") and row["weights"] == "uint8":
            key = ("yes", "between Q and DQ, with uint8 constants, it is one of the NPU's operators")
        elif row.get("right"):
            key = ("yes", "between Q and DQ it is one of the NPU's operators")
        elif row["taken_by"]:
            key = ("no", "the NPU's simulator answers otherwise than the arithmetic")
        else:
            key = ("no", "the provider does not take it in integers")
        groups.setdefault(key, []).append(operator)
    blocks = [
        f"[[rule]]\noperators = {_value(sorted(names))}\nint8 = {_value(verdict)}\nreason = {_value(reason)}\n"
        f'source = "executed: targets/qnn/htp.toml"\n'
        for (verdict, reason), names in sorted(groups.items(), reverse=True)
    ]
    return _RULES.format(version=version()) + "\n".join(blocks)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return '"' + value.replace("\\", "\\\\").replace('"', "'") + '"' if isinstance(value, str) else str(value)


_HEAD = """# The operators that Qualcomm's NPU takes, each tested alone between Q and DQ, and the errors of its answers.
# scripts/probe_qnn.py wrote this file. The graphs are in operators.txt.
#
# taken_by: architectures whose compiler took the operator.
# db: SQNR of the simulator's answers against those of ONNX Runtime's CPU kernels on the same file.
# arithmetic_db: SQNR of the answers of these CPU kernels against float32.
# steps: largest difference, in steps of the output.
# right: true if the differences are only roundings.
# weights: type of the constants. int8 constants are symmetric; convolutions have a scale per channel.

version = "{version}"
"""

_RULES = """# Operators that run in integers on Qualcomm's NPU. scripts/probe_qnn.py wrote this file from the operators
# that the simulator takes and from its answers. cpu.toml explains the fields.

title = "Qualcomm's NPU (HTP), QNN execution provider"
backend = "qnn"
verified = "{version}; never run on a chip"

[default]
reason = "not known to run in integers on the NPU: scripts/probe_qnn.py has no case of it"
source = "targets/qnn/htp.toml"

"""

if __name__ == "__main__":
    sys.exit(main())
