"""Compare edgeq's models for Rockchip's NPUs with the models of Rockchip's own quantizer. All of them run in the
compiler's simulator.

    python benchmarks/rknn.py [--only NAME ...] [--target rk3588] [--count 300] [--seen 300] [--json FILE]

`edgeq quantize` uses labelled samples, and other samples judge the result. If a case has only one set of samples, every
second sample is for `edgeq quantize`, and the others judge the result. Rockchip's quantizer uses the same calibration
samples and its own defaults. The benchmark needs rknn-toolkit2: `edgeq toolkit rknn --install`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from qnn import Steps, every_second, sizes_of
from tasks import shared_data
from tune_cases import Case, cases

import edgeq
from edgeq.backends.rknn.compile import UNFUSED, Compilation, ToolkitSession, platform_of
from edgeq.data.open_source import Data
from edgeq.hardware.target import Target, resolve
from edgeq.measure.accuracy import evaluate_sessions
from edgeq.model.load import unchecked_signature
from edgeq.model.prepare import prepare_model
from edgeq.run.session import open_session

FLOAT, OWN, UNFUSED_ORT, EDGEQ = "float32", "Rockchip's own int8", "ours, unfused ORT", "ours, simulator"


def own_int8(case: Case, target: Target, folder: Path) -> Compilation:
    """Compile the float model with the toolkit's own quantizer."""
    folder.mkdir()
    prepared = prepare_model(case.model, folder, simplify=False, fix=sizes_of(case))
    inputs = [spec.name for spec in unchecked_signature(prepared.path, prepared.path).inputs]
    lines = []
    for place, sample in enumerate(case.open(case.data, case.count or 100)):
        files = [folder / f"{place}-{number}.npy" for number in range(len(inputs))]
        for name, file in zip(inputs, files, strict=True):
            np.save(file, sample.inputs[name])
        lines.append(" ".join(map(str, files)))
    (folder / "calibration.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "work").mkdir()
    platform = platform_of(target)
    return Compilation(prepared.path, platform, folder / "work", inputs, quantize=folder / "calibration.txt")


def run(case: Case, target: Target, count: int, seen: int, folder: Path) -> dict[str, Any]:
    """Build and judge both models of a case, print the figures, and return them."""
    began, task = time.perf_counter(), case.make_task()
    made = edgeq.quantize(
        case.model,
        Data(case.data, case.preprocess, count=case.count),
        folder / "int8.onnx",
        target=target.name,
        val=every_second(case, case.tuned_on, 0, seen),
        task=task,
        fix=sizes_of(case) or None,
        timed=False,
        progress=Steps(),
    )
    took = time.perf_counter() - began
    signature = unchecked_signature(made.output, made.output)
    names = [spec.name for spec in signature.inputs]
    (folder / "simulated").mkdir()
    with ExitStack() as stack:
        own = stack.enter_context(own_int8(case, target, folder / "own"))
        ours = Compilation(made.output, platform_of(target), folder / "simulated", names)
        sessions: dict[str, Any] = {
            FLOAT: open_session(case.model),
            UNFUSED_ORT: open_session(made.output, UNFUSED),
            EDGEQ: ToolkitSession(stack.enter_context(ours), signature),
            OWN: ToolkitSession(own, signature),
        }
        samples = every_second(case, case.judged_on, 1, count)
        found = evaluate_sessions(sessions, samples, task=task, reference=UNFUSED_ORT)
    return {
        "name": case.name,
        "seconds": round(took),
        "samples": found.samples,
        "accuracy": {name: round(100 * accuracy.value, 2) for name, accuracy in found.accuracy.items()},
        "simulator_to_unfused_db": found.agreement[EDGEQ].sqnr_db,
        "repair": made.proof.repair.sentence if made.proof.repair is not None else "",
        "notes": [note for note in made.notes if "NPU" in note or "CPU" in note or "compile" in note],
    }


def main() -> None:
    """Run the chosen cases, then print and write their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--target", default="rk3588", help="target of the build")
    parser.add_argument("--count", type=int, default=300, help="largest number of samples that judge the result")
    parser.add_argument("--seen", type=int, default=300, help="largest number of samples that a repair sees")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args()
    root = shared_data()
    if root is None:
        raise SystemExit("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for case in cases(root, Path(name) / "halves"):
            if given.only and not any(case.name.startswith(wanted) for wanted in given.only):
                continue
            # The toolkit splits its list of samples at spaces, so a path must not contain any.
            folder = Path(name) / str(len(rows))
            folder.mkdir()
            rows.append(run(case, resolve(given.target), given.count, given.seen, folder))
            print(json.dumps(rows[-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
