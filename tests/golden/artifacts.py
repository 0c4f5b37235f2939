"""Build artifacts, write the SHA-256 of their files, and show the differences between two such records.

The last bits of a float pass depend on the CPU. So a record is compared only on the machine that made it, and is not
kept in the repository.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from edgeq import demo
from tests.conftest import find_shared_data

SPECS = Path(__file__).resolve().parents[2] / "benchmarks" / "specs"
TIMES = frozenset({"seconds"})
"""Names in a result that no two runs share."""

Record = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Inputs:
    """Hold the paths of a model and its samples. They are copied, so that artifacts contain no path of this machine."""

    name: str
    model: Path
    samples: Path
    validation: Path


DATA = ("--data", "../samples.npz", "--preprocess", "{preprocess}", "--count", "16")
GIVEN = ("../model.onnx", *DATA, "--no-timing", "--no-emulate")
QUANTIZE = ("quantize", *GIVEN, "-o", "int8.onnx")
PACKAGE = ("package", *GIVEN, "-o", "bundle", "--val", "../val.npz", "--task", "classification")
VNNI = ("-t", "cascade-lake")
ARTIFACTS: dict[str, tuple[str, ...]] = {
    "default": QUANTIZE,
    "qoperator": (*QUANTIZE, *VNNI, "--format", "QOperator"),
    "dynamic": (*QUANTIZE, *VNNI, "--dynamic"),
    "weight-only": (*QUANTIZE, *VNNI, "--weight-only", "4"),
    "s8s8": (*QUANTIZE, *VNNI, "--activation-type", "int8", "--weight-type", "int8"),
    "recovered": (*QUANTIZE, *VNNI, "--recover", "sequential-correction"),
    "retargeted": ("retarget", "../s8s8/int8.onnx", "-o", "int8.onnx", "--format", "QOperator"),
    "package-cpu": (*PACKAGE, "-t", "haswell", "-t", "cascade-lake", "-t", "raspberry-pi-5", "--with-float"),
    "package-nvidia": (*PACKAGE, "-t", "nvidia-t4"),
    "package-systolic": (*PACKAGE, "-t", "gemmini"),
}
REAL = (
    ("mlperf_tiny_kws", "mlperf_tiny_kws/data/calib_100.npz", "mlperf_tiny_kws/data/val_900.npz"),
    ("resnet20_cifar10", "cifar10/calib_lossless_300.npz", "cifar10/test_lossless_249.npz"),
)
"""Models of `shared/data`, their samples and labelled data; `SPECS` has their preprocessing by the same names."""
OF_REAL_MODELS = ("default", "qoperator", "package-nvidia")


def inputs() -> Iterator[Inputs]:
    """Yield the demo, and two real models if `shared/data` is next to the checkout."""
    yield Inputs("demo", demo.MODEL, demo.CALIBRATION, demo.VALIDATION)
    shared = find_shared_data()
    if shared is not None:
        for name, samples, validation in REAL:
            yield Inputs(name, shared / name / "model.onnx", shared / samples, shared / validation)


def build(folder: Path) -> Record:
    """Build every artifact below `folder` and return the description of each file."""
    made: list[Path] = []
    for given in inputs():
        place = folder / given.name
        place.mkdir(parents=True)
        for name, file in (("model.onnx", given.model), ("samples.npz", given.samples), ("val.npz", given.validation)):
            shutil.copyfile(file, place / name)
        preprocess = "none"
        for spec in SPECS.glob(f"{given.name}.toml"):
            preprocess = f"../{shutil.copyfile(spec, place / spec.name).name}"
        for name, line in ARTIFACTS.items():
            if given.name == "demo" or name in OF_REAL_MODELS:
                run(place / name, (word.replace("{preprocess}", preprocess) for word in line))
                made.append(place / name)
    return {str(file.relative_to(folder)): describe(file) for place in made for file in files(place)}


def run(place: Path, line: Iterable[str]) -> None:
    """Run a command in `place` and keep its result there as result.json."""
    place.mkdir()
    home = {name: str(place.parent.parent / ".home") for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME")}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "edgeq", *line, "--json", "-q"],
        cwd=place,
        env={**os.environ, **home, "PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{place}: {done.stderr}")
    result = {key: value for key, value in json.loads(done.stdout).items() if key not in TIMES}
    (place / "result.json").write_text(json.dumps(result, indent=1), "utf-8")
    print(f"{place.parent.name}/{place.name}: {time.monotonic() - began:.1f} s", file=sys.stderr)


def files(folder: Path) -> list[Path]:
    """Return the files below `folder`."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def describe(file: Path) -> dict[str, Any]:
    """Return a file's digest, with the operators and initializers of a model or the values of a JSON file."""
    found: dict[str, Any] = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    if file.suffix == ".onnx":
        model = onnx.load(file, load_external_data=False)
        graphs = list(all_graphs(model.graph))
        found["operators"] = Counter(node.op_type for graph in graphs for node in graph.node)
        found["initializers"] = {tensor.name: digest(tensor) for graph in graphs for tensor in graph.initializer}
    elif file.suffix == ".json":
        found["values"] = dict(leaves(json.loads(file.read_bytes())))
    return found


def all_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and the graphs inside its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from all_graphs(inner)


def digest(tensor: onnx.TensorProto) -> str:
    """Return a digest of a tensor's type, shape and values. External values count by location, which names a hash."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        place = sorted((entry.key, entry.value) for entry in tensor.external_data)
        return hashlib.sha256(f"{tensor.data_type} {tensor.dims} {place}".encode()).hexdigest()[:16]
    values = numpy_helper.to_array(tensor)
    return hashlib.sha256(f"{tensor.data_type} {values.shape} ".encode() + values.tobytes()).hexdigest()[:16]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of everything in a JSON value except lists and mappings."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{path}/{key}")
    else:
        yield path, value


def differences(before: Record, after: Record) -> Iterator[str]:
    """Yield a line for each file that is missing from one record or differs, followed by the details."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield f"{name}: {'new' if old is None else 'gone'}"
        elif old["sha256"] != new["sha256"]:
            yield f"{name}: differs"
            yield from (f"    {line}" for line in details(old, new))


def details(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences inside a model or a JSON file."""
    for part in ("operators", "initializers", "values"):
        if part not in old or part not in new:
            continue
        one, other = old[part], new[part]
        if part == "operators":
            counts = [
                f"{o} {one.get(o, 0)} to {other.get(o, 0)}"
                for o in sorted({*one, *other})
                if one.get(o) != other.get(o)
            ]
            yield f"operators: {', '.join(counts) or 'the same'}"
            continue
        gone, come = sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())
        changed = sorted(key for key in one.keys() & other.keys() if one[key] != other[key])
        for what, keys in (("gone", gone), ("new", come), ("changed", changed)):
            if keys:
                yield f"{part} {what}: {len(keys)}, such as {', '.join(keys[:3])}"
        if not (gone or come or changed):
            yield f"{part}: the same"
        if part == "initializers" and sorted(one.values()) == sorted(other.values()):
            yield "initializers: the same values under other names"


def main() -> None:
    """Build artifacts, or compare two records of them and exit with 1 if they differ."""
    parser = argparse.ArgumentParser(prog="scripts/golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build the artifacts and write a record")
    building.add_argument("record", type=Path)
    building.add_argument("--keep", type=Path, metavar="DIR", help="a new folder, which keeps the artifacts")
    comparing = commands.add_parser("compare", help="tell which files differ, and how")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        found = list(differences(*(json.loads(path.read_text("utf-8")) for path in (given.before, given.after))))
        print("\n".join(found) or "no file differs")
        sys.exit(bool(found))
    with tempfile.TemporaryDirectory(prefix="edgeq-golden-") as scratch:
        record = build(given.keep or Path(scratch))
    given.record.write_text(json.dumps(record, indent=1), "utf-8")
    print(f"{len(record)} files: {given.record}")


if __name__ == "__main__":
    main()
