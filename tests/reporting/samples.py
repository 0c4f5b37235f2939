"""Make records to draw: a full one, hostile ones, huge ones. All numbers are made up."""

from __future__ import annotations

import math
from typing import Any

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; alert(1); //",
    "<!-- --><svg onload=alert(1)>",
    "\u202egnp.exe\u202c and \u2066more",
    "שלום עולם / مرحبا / 你好 / 🙂👩‍👩‍👧",
    "new\nline\ttab\0nul\x1b[31m",
    "\ud800 lone surrogate",
    "{{constructor}} ${alert(1)} %s %n",
    "x" * 20_000,
    "",
)


def figures(p50: float) -> dict[str, float]:
    return {
        "count": 1000,
        "min_ms": 0.9 * p50,
        "p50_ms": p50,
        "p90_ms": 1.2 * p50,
        "p99_ms": 2 * p50,
        "p999_ms": 3 * p50,
        "max_ms": 4 * p50,
        "mean_ms": 1.1 * p50,
        "cv": 0.2,
        "samples_per_s": 1000 / p50,
    }


def claim(base: float, other: float) -> dict[str, Any]:
    around = {"estimate": base / other, "low": 0.95 * base / other, "high": 1.05 * base / other}
    return {**around, "confidence": 0.96, "pairs": 20, "baseline_ms": base, "ms": other, "reason": ""}


def bench_report(base: float = 2.0, other: float = 0.8) -> dict[str, Any]:
    edges = [0.5 * 1.06**i for i in range(41)]
    counts = [0, 0, *range(19), *reversed(range(19))]
    return {
        "baseline": "float32",
        "settings": {"threads": 0, "pin": [0, 1], "min_duration_s": 2.0},
        "machine": {"cpu_name": "A CPU", "architecture": "x"},
        "versions": {"onnxruntime": "1.31.1"},
        "models": {"float32": {"memory": {"process_peak_bytes": 6e7}}, "int8": {"memory": None}},
        "scenarios": {
            "single-stream": {
                "models": {
                    "float32": {"latency": figures(base), "histogram": counts[:40]},
                    "int8": {"latency": figures(other), "histogram": counts[:40]},
                },
                "ratios": {
                    "int8": {"estimate": base / other, "low": 2.3, "high": 2.6, "confidence": 0.95, "pairs": 20}
                },
                "histogram_edges_ms": edges,
            }
        },
        "notes": ["the machine was loaded"],
    }


def assessment(drop: float, **changes: Any) -> dict[str, Any]:
    figures = {"samples": 500, "complete": True, "basis": "labels", "drop": drop, "low": drop, "high": drop}
    return {**figures, "expected": drop, "metrics": {}, **changes}


def accuracy(metrics: dict[str, float], **changes: Any) -> dict[str, Any]:
    primary = next(iter(metrics))
    known = {"metrics": metrics, "samples": 500, "task": "classification", "primary": primary, "higher_is_better": True}
    return {**known, **changes}


def output(sqnr_db: float | None, **changes: Any) -> dict[str, Any]:
    known = {"name": "scores", "elements": 5000, "sqnr_db": sqnr_db, "cosine": 0.9996, "max_abs_error": 0.3}
    return {**known, "top1": 0.982, "nonfinite": 0, "mismatched": 0, **changes}


def candidate(name: str, top1: float, ms: float, status: str = "qualified", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "scheme": {"mode": "static", "format": "QDQ", "method": "mse", "per_channel": True, "exclude": ["a", "b"]},
        "recoveries": ["sequential-correction"],
        "threads": 2,
        "stage": "space",
        "status": status,
        "reason": "",
        "pareto": False,
        "screening": {"bytes": 500_000, "structure": "s", "content": "c", "int8_mac_share": 0.97, "sqnr_db": 30.0},
        "accuracy": assessment(0.5678 - top1, metrics={"top1": top1}),
        "timing": {"latency": figures(ms), "speedup": claim(2.0, ms)},
        **changes,
    }


def tuning() -> dict[str, Any]:
    return {
        "schema": "edgeq.tuning/1",
        "model": {"name": "net", "sha256": "ab" * 32, "bytes": 2_000_000},
        "metric": {"name": "top1", "higher_is_better": True},
        "goal": {"objective": "latency", "max_drop": 0.005, "budget_s": 600},
        "elapsed_s": 312.4,
        "verdict": ["winner is the fastest that loses at most 0.5 points"],
        "needed": [],
        "float32": {"accuracy": {"top1": 0.5678}, "timing": {"latency": figures(2.0)}, "bytes": 2_000_000},
        "chosen": "winner",
        "candidates": [
            candidate("winner", 0.566, 0.8, "chosen", pareto=True),
            candidate("exact", 0.5675, 1.1, pareto=True),
            candidate("behind", 0.5650, 1.2),
            candidate("short", 0.5500, 0.7, "short", pareto=True, reason="loses 1.78 points"),
            candidate("broken", 0.02, 0.75, "short", reason="loses 54.78 points"),
            candidate("early", 0.0, 1.0, "eliminated", accuracy=None, timing=None, reason="does not load"),
        ],
        "settled": True,
        "out_of_time": False,
        "histograms": {},
    }


def layer(name: str, own: float, so_far: float) -> dict[str, Any]:
    return {
        "name": f"{name}_out",
        "node": name,
        "op_type": "Conv",
        "accumulated": {"sqnr_db": so_far, "cosine": 0.999},
        "layer": {"sqnr_db": own},
        "saturated": {"low": 0.0, "high": 0.01},
    }


def error_source(node: str, reason: str) -> dict[str, Any]:
    known = {"name": f"{node}_out", "node": node, "op_type": "Conv", "output_sqnr_db": 30.0, "share": 0.4}
    return {**known, "cause": "range", "reason": reason, "exclude": [node]}


def histogram(tensor: str = "t") -> dict[str, Any]:
    edges = [-4 + 0.1 * i for i in range(101)]
    return {
        "tensor": tensor,
        "edges": edges,
        "counts": [int(1e5 * math.exp(-abs(e))) for e in edges[:-1]],
        "zeros": 0.3,
        "clipped": 0.002,
        "chosen": "percentile",
        "thresholds": [
            {"method": "minmax", "low": -4.0, "high": 6.0, "sqnr_db": 31.0},
            {"method": "percentile", "low": -2.0, "high": 4.0, "sqnr_db": 36.9},
            {"method": "moving-average", "low": -1.0, "high": 2.0, "sqnr_db": None},
        ],
    }


def kernels(names: list[str]) -> dict[str, Any]:
    return {
        "float32": [{"name": n, "op_type": "Conv", "kind": "float", "us": 100.0 + i} for i, n in enumerate(names)],
        "int8": [
            *({"name": n, "op_type": "QLinearConv", "kind": "int8", "us": 40.0 + i} for i, n in enumerate(names)),
            {"name": "q", "op_type": "QuantizeLinear", "kind": "conversion", "us": 9.0},
        ],
    }


def variant(layers: int = 30) -> dict[str, Any]:
    names = [f"block.{i}/Conv" for i in range(layers)]
    return {
        "title": "A machine",
        "target": "this-machine",
        "profile": "some-profile",
        "scheme": {"mode": "static", "format": "QDQ", "method": "percentile", "exclude": ["block.1/Conv"]},
        "session_options": {"session.some": "1"},
        "bytes": 600_000,
        "native": True,
        "coverage": {
            "int8_mac_share": 0.97,
            "int8_macs": 97_000_000,
            "float_macs": 3_000_000,
            "operators": [
                {
                    "op_type": "QLinearConv",
                    "int8_macs": 97_000_000,
                    "float_macs": 0,
                    "int8_kernels": 29,
                    "float_kernels": 0,
                },
                {"op_type": "Conv", "int8_macs": 0, "float_macs": 3_000_000, "int8_kernels": 0, "float_kernels": 1},
            ],
            "float_nodes": [
                {"name": "block.1/Conv", "op_type": "Conv", "macs": 3_000_000, "reason": "kept in float on request"},
                {"name": "softmax", "op_type": "Softmax", "macs": 0, "reason": "no int8 kernel"},
            ],
        },
        "agreement": {
            "samples": 500,
            "outputs": [output(31.5)],
        },
        "accuracy": {
            "float32": accuracy({"top1": 0.5678, "top5": 0.8}),
            "int8": accuracy({"top1": 0.566, "top5": 0.799}),
        },
        "samples": 500,
        "held_out": True,
        "warnings": ["accuracy was measured on few samples"],
        "layers": {
            "activations": [layer(n, 40 - 0.5 * i, 38 - 0.8 * i) for i, n in enumerate(names)],
            "error_sources": [error_source("block.2/Conv", "its range is wide")],
        },
        "kernels": kernels(names),
        "histograms": [histogram(f"tensor{i}") for i in range(4)],
    }


def record(**changes: Any) -> dict[str, Any]:
    """Return a record with everything that a report can show."""
    return {
        "schema": "edgeq.report/1",
        "name": "net",
        "model": {"sha256": "ab" * 32, "bytes": 2_000_000},
        "variants": {"int8": variant()},
        "tuning": tuning(),
        "bench": bench_report(),
        "machine": {"cpu_name": "A CPU", "cores": 8, "memory_bytes": 16_000_000_000, "gpus": [{"name": "A GPU"}]},
        "versions": {"edgeq": "0.2.0", "onnxruntime": "1.31.1"},
        "identity": {"manifest, sha256": "cd" * 32},
        "commands": ["edgeq verify BUNDLE"],
        "notes": ["7 BatchNormalization folded"],
        **changes,
    }


def renamed(value: Any, name: str) -> Any:
    """Replace every text in `value` with `name`. Keys stay, because the report reads them by name."""
    if isinstance(value, dict):
        return {key: renamed(item, name) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, name) for item in value]
    return name if isinstance(value, str) else value
