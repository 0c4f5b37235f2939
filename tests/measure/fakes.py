"""Define samples and sessions that are made only of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from tests.graphs import proto


@dataclass(frozen=True)
class FakeSample:
    name: str = "sample"
    inputs: Mapping[str, np.ndarray] = field(default_factory=lambda: {"x": np.zeros((1, 2), np.float32)})
    label: Any = None
    context: Mapping[str, Any] = field(default_factory=dict)


class FakeSamples:
    source = "fake"

    def __init__(self, samples: Sequence[FakeSample]) -> None:
        self._samples = list(samples)
        self.decoded = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[FakeSample]:
        for sample in self._samples:
            self.decoded += 1
            yield sample

    def digest(self) -> str:
        return "0" * 64


class FakeSession:
    """Compute outputs with a Python function of the inputs."""

    def __init__(self, function: Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]], names: Sequence[str]) -> None:
        self._function = function
        self._names = names

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self._names]

    def run(self, names: Sequence[str] | None, feed: Mapping[str, np.ndarray]) -> list[Any]:
        outputs = self._function(feed)
        return [outputs[name] for name in names or self._names]


def vectors(arrays: Sequence[np.ndarray], labels: Sequence[Any] | None = None) -> FakeSamples:
    """Return one sample for each array, with the names sample0, sample1, …"""
    sample_labels = labels if labels is not None else [None] * len(arrays)
    return FakeSamples(
        [FakeSample(f"sample{i}", {"x": a}, y) for i, (a, y) in enumerate(zip(arrays, sample_labels, strict=True))]
    )


def linear_model(scale: float = 1.0, width: int = 3) -> onnx.ModelProto:
    """Return a model y = scale * x, float32 [N, width]."""
    shape = f"float[N, {width}]"
    return proto(f"linear ({shape} x) => ({shape} y) <float scale = {{{scale}}}> {{ [mul] y = Mul(x, scale) }}")


def matmul_file(path: Path, width: int) -> Path:
    """Write a real model, x: float32 [n, 64] → y: float32 [n, width], to `path`."""
    body = f"g (float[n, 64] x) => (float[n, {width}] y) {{ y = MatMul(x, w) }}"
    model = proto(body, {"w": np.full((64, width), 0.5, np.float32)})
    path.write_bytes(model.SerializeToString())
    return path
