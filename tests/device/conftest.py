"""Provide a clock that tests advance by hand, so that nothing here depends on the speed of this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.graphs import proto


class SyntheticClock:
    """Count seconds that pass only when a runner runs or code sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += max(seconds, 1e-6)

    def runner(self, latencies: Iterable[float], log: list[str] | None = None, name: str = "") -> Callable[[], None]:
        """Return a runner whose runs take these seconds, in a cycle."""
        taken = cycle(latencies)

        def run() -> None:
            self.now += next(taken)
            if log is not None:
                log.append(name)

        return run


@pytest.fixture
def clock() -> SyntheticClock:
    return SyntheticClock()


class FakeSession:
    """Provide what `run_bench` needs of a session: runs that take a given time on the synthetic clock."""

    def __init__(self, clock: SyntheticClock, seconds: float, *, fixed_batch: bool = False) -> None:
        self._clock = clock
        self._seconds = seconds
        self._fixed_batch = fixed_batch
        self.runs = 0

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]

    def get_inputs(self) -> list[Any]:
        size = 1 if self._fixed_batch else "n"
        return [SimpleNamespace(name="x", type="tensor(float)", shape=[size, 4])]

    def run(self, names: None, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        rows = feed["x"].shape[0]
        if self._fixed_batch and rows != 1:
            raise RuntimeError(f"Got invalid dimensions for input: x\n index: 0 Got: {rows} Expected: 1.")
        self._clock.now += self._seconds * rows
        self.runs += 1
        return [feed["x"]]


@pytest.fixture
def fake_session(clock: SyntheticClock) -> Callable[..., FakeSession]:
    return lambda seconds, **options: FakeSession(clock, seconds, **options)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write two small real models with the same input, x: float32[n, 64]. "wide" does more work."""
    folder = tmp_path_factory.mktemp("models")
    return {name: _model(folder / f"{name}.onnx", width) for name, width in (("narrow", 8), ("wide", 2048))}


def _model(path: Path, width: int) -> Path:
    body = f"g (float[n, 64] x) => (float[n, {width}] y) {{ y = MatMul(x, w) }}"
    model = proto(body, {"w": np.full((64, width), 0.5, np.float32)})
    path.write_bytes(model.SerializeToString())
    return path
