"""Tell from one product of the largest integers how the running kernels add: exactly, or clamped to 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.engines.catalog import EngineSpec
from edgeq_device.system.places import scratch_folder
from numpy.typing import NDArray

from edgeq.errors import CheckFailedError
from edgeq.measure.inference import Session
from edgeq.model.convert import bytes_of_text
from edgeq.run.session import SessionSettings

EXACT, SATURATED = "exact", "saturated"

# Two products of the largest values add up to 2 x 255 x 127 = 64,770, which does not fit 16 bits. A kernel that adds
# pairs in 16 bits gives 32,767 for each pair. No kernel treats these matrix sizes as a special case.
_ROWS, _DEPTH, _COLUMNS = 8, 64, 32
_LEFT, _RIGHT, _CLAMP = 255, 127, 32767


@cache
def build_probe_model() -> bytes:
    """Return the probe model: a product of u8 inputs with constant s8 values."""
    return bytes_of_text(
        f"""<ir_version: 8, opset_import: ["": 13]>
        probe (uint8[{_ROWS}, {_DEPTH}] left) => (int32[{_ROWS}, {_COLUMNS}] sums) {{
            sums = MatMulInteger(left, right)
        }}""",
        {"right": np.full((_DEPTH, _COLUMNS), _RIGHT, np.int8)},
    )


def build_integer_model(weights: NDArray[np.int8]) -> bytes:
    """Return a model with a Conv and a MatMul of uint8 activations with `weights`, int8 [outputs, k]. All scales are 1.

    From float32 "x" [4, k, 1, 1], it computes the exact integers "conv" and "product" as float32.
    """
    outputs, k = weights.shape
    return bytes_of_text(
        f"""<ir_version: 8, opset_import: ["": 17]>
        integers (float[4, {k}, 1, 1] x) => (float[4, {outputs}, 1, 1] conv, float[4, {outputs}] product)
        <float one = {{1}}, uint8 zero = {{0}}, int8 none = {{0}}, int64[2] rows = {{-1, {k}}}> {{
            q = QuantizeLinear(x, one, zero)
            d = DequantizeLinear(q, one, zero)
            f = DequantizeLinear(filters, one, none)
            conv = Conv<kernel_shape = [1, 1]>(d, f)
            r = Reshape(d, rows)
            m = DequantizeLinear(matrix, one, none)
            product = MatMul(r, m)
        }}""",
        {"filters": weights.reshape(outputs, k, 1, 1), "matrix": weights.T},
    )


# Products of the largest int8 values in a convolution of 3 x 3, which engines with a format of their own write as one
# layer. Winograd kernels whose numbers wrap give other sums.
_CHANNELS, _SIZE, _FILTERS = 16, 8, 32


@cache
def build_signed_model() -> bytes:
    """Return a Q/DQ model with a Conv of int8 activations and int8 weights, all with scale 1 and without zero points.

    From float32 "x" [1, 16, 8, 8] it computes "sums", float32 [1, 32, 6, 6].
    """
    return bytes_of_text(
        f"""<ir_version: 8, opset_import: ["": 17]>
        signed (float[1, {_CHANNELS}, {_SIZE}, {_SIZE}] x)
            => (float[1, {_FILTERS}, {_SIZE - 2}, {_SIZE - 2}] sums)
        <float one = {{1}}, int8 none = {{0}}> {{
            q = QuantizeLinear(x, one, none)
            d = DequantizeLinear(q, one, none)
            f = DequantizeLinear(filters, one, none)
            sums = Conv<kernel_shape = [3, 3]>(d, f)
        }}""",
        {"filters": np.full((_FILTERS, _CHANNELS, 3, 3), _RIGHT, np.int8)},
    )


@contextmanager
def probe_file(content: bytes = b"") -> Iterator[Path]:
    """Yield a file with the probe model, or with `content` if it is not empty. The file is removed after the block."""
    with scratch_folder("edgeq-probe-") as folder:
        file = Path(folder) / "probe.onnx"
        file.write_bytes(content or build_probe_model())
        yield file


def probe(session: Session, title: str) -> str:
    """Run the probe and return "exact" or "saturated".

    Raises:
        CheckFailedError: the sums are neither exact nor saturated.
    """
    (sums,) = session.run(["sums"], {"left": np.full((_ROWS, _DEPTH), _LEFT, np.uint8)})
    return classify_sums(np.asarray(sums), title)


def probe_engine(open_it: Callable[[Path, SessionSettings], Any], engine: EngineSpec, title: str) -> str:
    """Run the probe on an engine whose kernels accept only Q/DQ models. Return "exact" or "saturated".

    Args:
        open_it: a function that opens a file as a session in a process of the engine.

    Raises:
        CheckFailedError: the sums are neither exact nor saturated.
    """
    with probe_file(build_integer_model(np.full((_COLUMNS, _DEPTH), _RIGHT, np.int8))) as file:
        # One thread: how the sums are added does not depend on the number of threads.
        session = open_it(file, SessionSettings(engine=engine, intra_op_threads=1))
        # The engine quantizes the inputs itself, so they are the same integers as floats.
        (sums,) = session.run(["product"], {"x": np.full((4, _DEPTH, 1, 1), _LEFT, np.float32)})
        session.close()
    return classify_sums(np.asarray(sums), title)


def probe_signed(open_it: Callable[[Path, SessionSettings], Any], engine: EngineSpec, title: str) -> str:
    """Run the probe on an engine whose kernels take only signed activations without zero points. Return "exact".

    Args:
        open_it: see `probe_engine`.

    Raises:
        CheckFailedError: the sums are not exact.
    """
    with probe_file(build_signed_model()) as file:
        session = open_it(file, SessionSettings(engine=engine, intra_op_threads=1))
        (sums,) = session.run(["sums"], {"x": np.full((1, _CHANNELS, _SIZE, _SIZE), _RIGHT, np.float32)})
        session.close()
    return classify_sums(np.asarray(sums), title, {EXACT: 9 * _CHANNELS * _RIGHT * _RIGHT})


_SUMS = {EXACT: _DEPTH * _LEFT * _RIGHT, SATURATED: _DEPTH // 2 * _CLAMP}


def classify_sums(sums: NDArray[Any], title: str, values: Mapping[str, int] = _SUMS) -> str:
    """Return "exact" or "saturated" for the probe's output (int32).

    Args:
        title: the name of the runtime, for messages.
        values: the sum of each kind.

    Raises:
        CheckFailedError: the sums are neither exact nor saturated.
    """
    # All elements are equal by construction, so one wrong element is a fault of the kernel.
    for kind, value in values.items():
        if (sums == value).all():
            return kind
    raise CheckFailedError(
        f"{title}: integer products are wrong ({int(sums.min())} to {int(sums.max())})",
        "Do not trust results from this CPU",
    )
