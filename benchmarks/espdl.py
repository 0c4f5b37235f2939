"""Compare edgeq's models for Espressif's chips with those of esp-ppq, Espressif's own quantizer, with its defaults.

    python benchmarks/espdl.py --ppq PYTHON [--only NAME ...] [--target esp32-s3] [--count 450] [--seen 450]

`edgeq quantize` uses labelled samples, and other samples judge the result. If a case has only one set of samples, every
second sample is for `edgeq quantize`, and the others judge the result. esp-ppq uses the first 32 of the same
calibration samples, as its own examples do. edgeq's model runs in onnxruntime without fusion, esp-ppq's model in
esp-ppq's executor. PYTHON is the Python of an environment with `pip install torch esp-ppq`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from qnn import Steps, every_second, sizes_of
from tasks import shared_data
from tune_cases import Case, cases

import edgeq
from edgeq.backends.espdl.backend import UNFUSED
from edgeq.data.open_source import Data
from edgeq.data.samples import Samples
from edgeq.hardware.target import resolve
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.model.load import model_signature
from edgeq.model.prepare import prepare_model
from edgeq.run.session import SessionSettings, open_session

FLOAT, EDGEQ, PPQ = "float32", "edgeq", "esp-ppq"
WORKER = Path(__file__).with_name("espdl_ppq.py")


@dataclass(frozen=True)
class SavedOutput:
    """Name the output of a saved session."""

    name: str


class SavedSession:
    """Give outputs that were computed before, in the order of the samples."""

    def __init__(self, name: str, outputs: NDArray[Any]) -> None:
        self._name = name
        self._rows: Iterator[NDArray[Any]] = iter(outputs)

    def get_outputs(self) -> Sequence[SavedOutput]:
        """Return the only output."""
        return [SavedOutput(self._name)]

    def run(self, output_names: Sequence[str] | None, input_feed: Any) -> Sequence[Any]:
        """Return the outputs of the next samples."""
        del output_names
        count = len(next(iter(input_feed.values())))
        return [np.stack([next(self._rows) for _ in range(count)])]


def run_ppq(case: Case, chip: str, samples: Samples, python: Path, folder: Path) -> NDArray[Any]:
    """Return the outputs of esp-ppq's model for all samples."""
    prepared = prepare_model(case.model, folder, simplify=False, fix=sizes_of(case))
    arrays = {"calibration": case.open(case.data, case.count or 100), "samples": samples}
    for name, source in arrays.items():
        np.save(folder / f"{name}.npy", np.concatenate([next(iter(sample.inputs.values())) for sample in source]))
    files = [str(folder / f"{name}.npy") for name in (*arrays, "outputs")]
    subprocess.run([python, WORKER, prepared.path, chip, *files], check=True, stdout=subprocess.DEVNULL)
    outputs: NDArray[Any] = np.load(folder / "outputs.npy")
    return outputs


def run(case: Case, target: str, count: int, seen: int, python: Path, folder: Path) -> dict[str, Any]:
    """Build and judge both models of a case, and return the figures."""
    began, task = time.perf_counter(), case.make_task()
    quantized = edgeq.quantize(
        case.model,
        Data(case.data, case.preprocess, count=case.count),
        folder / "int8.onnx",
        target=target,
        val=every_second(case, case.tuned_on, 0, seen),
        task=task,
        fix=sizes_of(case) or None,
        timed=False,
        progress=Steps(),
    )
    took = time.perf_counter() - began
    samples = every_second(case, case.judged_on, 1, count)
    (folder / "ppq").mkdir()
    chip = resolve(target).device["engine_options"]["chip"].replace("-", "")
    output = model_signature(case.model).outputs[0].name
    sessions: dict[str, Any] = {
        FLOAT: open_session(case.model),
        EDGEQ: open_session(quantized.output, SessionSettings(config=UNFUSED)),
        PPQ: SavedSession(output, run_ppq(case, chip, samples, python, folder / "ppq")),
    }
    result = evaluate_sessions(sessions, samples, task=task, reference=FLOAT)
    return {
        "name": case.name,
        "target": target,
        "seconds": round(took),
        "samples": result.samples,
        "accuracy": {name: round(100 * accuracy.value, 2) for name, accuracy in result.accuracy.items()},
        "sqnr_db": {name: agreement.sqnr_db for name, agreement in result.agreement.items()},
        "repair": quantized.proof.repair.sentence if quantized.proof.repair is not None else "",
    }


def main() -> None:
    """Run the chosen cases, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ppq", type=Path, required=True, help="Python of an environment with esp-ppq")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--target", default="esp32-s3", help="target of the build")
    parser.add_argument("--count", type=int, default=450, help="largest number of samples that judge the result")
    parser.add_argument("--seen", type=int, default=450, help="largest number of samples that a repair sees")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    root = shared_data()
    if root is None:
        raise SystemExit("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases(root, Path(name) / "halves"):
            # Detection and anomalies need several outputs of a sample, which the worker does not return.
            if case.options[1] != "classification" or (given.only and not case.name.startswith(tuple(given.only))):
                continue
            folder = Path(name) / str(len(rows))
            folder.mkdir()
            rows.append(run(case, given.target, given.count, given.seen, given.ppq, folder))
            print(json.dumps(rows[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
