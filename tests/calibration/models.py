"""Provide small models and samples that the calibration tests share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeq.data.sample import Sample
from tests.graphs import proto


@dataclass(frozen=True)
class ListSamples:
    """Hold samples from a list of inputs. Raise KeyboardInterrupt after `interrupt_after` samples, as Ctrl-C does."""

    items: Sequence[Mapping[str, np.ndarray]]
    interrupt_after: int | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sample]:
        for index, inputs in enumerate(self.items):
            if index == self.interrupt_after:
                raise KeyboardInterrupt
            yield Sample(f"sample-{index}", inputs)

    def digest(self) -> str:
        return f"list-{len(self.items)}-{hash(tuple(i[k].tobytes() for i in self.items for k in sorted(i))):x}"


def write(path: Path, body: str, weights: Mapping[str, Any] | None = None) -> Path:
    """Write a graph in ONNX's text form (`tests.graphs.proto`) as a file."""
    model = proto(body, weights)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def small_cnn(path: Path, channels: int = 32, size: int | str = 12) -> Path:
    """Write a network of two convolutions with Clip and Relu, a residual Add, a Concat, pooling and a classifier.
    `channels` need not be a multiple of 16.
    """
    random = np.random.default_rng(7)
    weights = {
        "w1": random.normal(0, 0.3, (channels, 3, 3, 3)).astype(np.float32),
        "b1": random.normal(0, 0.3, channels).astype(np.float32),
        "w2": random.normal(0, 0.1, (channels, channels, 3, 3)).astype(np.float32),
        "w3": random.normal(0, 0.1, (2 * channels, 10)).astype(np.float32),
        "zero": np.float32(0),
        "six": np.float32(6),
    }
    body = f"""cnn (float[N, 3, {size}, {size}] x) => (float[N, 10] y) {{
        [conv1] conv1 = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
        [clip1] clip1 = Clip(conv1, zero, six)
        [conv2] conv2 = Conv<pads = [1, 1, 1, 1]>(clip1, w2)
        [sum] sum = Add(conv2, clip1)
        [relu] relu = Relu(sum)
        [both] both = Concat<axis = 1>(relu, clip1)
        [pool] pool = GlobalAveragePool(both)
        [flat] flat = Flatten(pool)
        [y] y = MatMul(flat, w3)
    }}"""
    return write(path, body, weights)


def images(count: int, size: int = 12, seed: int = 0) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [{"x": random.normal(size=(1, 3, size, size)).astype(np.float32)} for _ in range(count)]
