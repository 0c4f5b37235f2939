"""Measure the speed of int8 against float32 without regard to accuracy. The benchmark runs `edgeq tune` on models of
well-known shapes with random weights.

    python benchmarks/shapes.py [--samples N] [--json FILE]

Here, accuracy means how closely the outputs on random images match those of float32 (SQNR).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from contenders import edgeq_json
from models import IMAGE, mobilenetv2_shaped, resnet50_shaped
from tuned import race, verdict

SHAPES = {"ResNet-50-shaped": (resnet50_shaped, 3.0), "MobileNetV2-shaped": (mobilenetv2_shaped, 2.5)}


def main() -> None:
    """Tune each model, then print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    machine = edgeq_json("detect")
    print(f"onnxruntime {onnxruntime.__version__}, profile {machine['match']['profile']}")
    results: dict[str, Any] = {"machine": machine}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images.npy"
        images = np.random.default_rng(0).normal(size=(options.samples, 3, IMAGE, IMAGE)).astype(np.float32)
        np.save(data, images)
        for name, (make, bar) in SHAPES.items():
            print(f"\n{name}")
            model, bundle = make(Path(folder) / f"{name}.onnx"), Path(folder) / name
            record = edgeq_json("tune", str(model), "--data", str(data), "-o", str(bundle), "-q")
            for line in record["verdict"]:
                print(f"    {line}")
            chosen = next(c for c in record["candidates"] if c["name"] == record["chosen"])
            print(f"    outputs' SQNR {chosen['accuracy']['sqnr_db']:.1f} dB, tuned in {record['elapsed_s']:.0f} s")
            speed = race(model, bundle, {"input": images[:1]}, "float32")
            verdict(f"{speed:.2f} times float32's speed", speed >= bar, f"at least {bar}")
            results[name] = {"speed": speed, "tune": record}
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
