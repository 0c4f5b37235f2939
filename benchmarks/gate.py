"""Count the errors that `edgeq gate` makes on a model that is not slower and on one that is 10 % slower.

    python benchmarks/gate.py [--runs 30] [--duration 5] [--json FILE]

The baseline is a chain of equal convolutions. "Unchanged" is the same chain in a file with different bytes, because
edgeq does not time identical files. "Slower" has a tenth more convolutions. The gate's limit is 5 %. Each model is
checked 30 times. At most one false alarm may occur (an inconclusive run counts as one), and the slower model must be
found at least 29 times. The benchmark needs a quiet machine and takes 12 to 20 minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edgeq.reporting.compare import CompareRequest
from edgeq.reporting.gate import GateLimits, gate

LAYERS, CHANNELS, SIZE = 20, 32, 28
MOST_FALSE_ALARMS, FEWEST_FOUND = 1 / 30, 29 / 30


def chain(path: Path, layers: int, note: str) -> Path:
    """Write a chain of `layers` convolutions of the same shape, each with its own weights. `note` only changes the
    file's bytes.
    """
    random = np.random.default_rng(0)
    nodes, weights = [], []
    for i in range(layers):
        w = random.normal(0, 1 / np.sqrt(9 * CHANNELS), (CHANNELS, CHANNELS, 3, 3)).astype(np.float32)
        weights.append(numpy_helper.from_array(w, f"w{i}"))
        nodes.append(helper.make_node("Conv", [f"x{i}", f"w{i}"], [f"x{i + 1}"], f"conv{i}", pads=[1, 1, 1, 1]))
    shape = [1, CHANNELS, SIZE, SIZE]
    x, y = (helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, shape) for i in (0, layers))
    graph = helper.make_graph(nodes, "chain", [x], [y], weights)
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, doc_string=note)
    # The output has the same name in all models, whatever their number of layers is.
    model.graph.output[0].name = model.graph.node[-1].output[0] = "y"
    onnx.save(model, path)
    return path


def main() -> None:
    """Run the gate on both models, then print and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--duration", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    limits = GateLimits(max_growth=1.0, max_memory_growth=9.0)
    outcomes: dict[str, list[str]] = {"unchanged": [], "slower": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        baseline = chain(folder / "baseline.onnx", LAYERS, "")
        models = {
            "unchanged": chain(folder / "same.onnx", LAYERS, "other bytes"),
            "slower": chain(folder / "slower.onnx", LAYERS + LAYERS // 10, ""),
        }
        began = time.monotonic()
        for run in range(arguments.runs):
            for name, model in models.items():
                request = CompareRequest(baseline, model, threads=arguments.threads, duration_s=arguments.duration)
                gated = gate(request, limits)
                outcomes[name].append(gated.outcome)
                compared = gated.comparison
                ratio = compared.measurement.ratio("B") if compared is not None and compared.measurement else {}
                ends = f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio.get("low") else ratio.get("reason", "")
                print(f"{run + 1:2} {name:9} {gated.outcome:12} {ends}", flush=True)
        seconds = time.monotonic() - began
    counts = {name: Counter(found) for name, found in outcomes.items()}
    alarms, found = arguments.runs - counts["unchanged"]["passed"], counts["slower"]["failed"]
    print(f"unchanged: {dict(counts['unchanged'])}: {alarms} of {arguments.runs} did not pass (bar: at most 1 of 30)")
    print(f"10 % slower: {dict(counts['slower'])}: {found} of {arguments.runs} found (bar: at least 29 of 30)")
    print(f"{seconds:.0f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"outcomes": outcomes, "seconds": seconds}, indent=1) + "\n")
    if alarms > MOST_FALSE_ALARMS * arguments.runs or found < FEWEST_FOUND * arguments.runs:
        raise SystemExit("a bar is missed")


if __name__ == "__main__":
    main()
