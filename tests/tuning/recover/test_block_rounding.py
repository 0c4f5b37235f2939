"""Test the joint rounding of weights in blocks: it reduces the error on samples that the rounding did not use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgeq.data.sample import Sample
from edgeq.errors import UsageError
from edgeq.hardware.target import resolve
from edgeq.model.load import read_model
from edgeq.prove.job import Job
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from edgeq.tuning.recover.run import Recoverer
from tests.backends.networks import prepared, sqnr_db
from tests.graphs import proto
from tests.tuning.recover.nets import FewSamples

K, N = 48, 40
NET = f"""g (float[B,{K}] x) => (float[B,{N}] y) <float[{K},{N}] w, float[{N},{K}] u, float[{N},{K}] v, float[{N}] b> {{
    [first] a = MatMul(x, w) [relu] r = Relu(a) [second] c = MatMul(r, u) [third] y = Gemm<transB = 1>(c, v, b)
}}"""


def net() -> onnx.ModelProto:
    random = np.random.default_rng(0)
    model = proto(NET)
    held = {
        "w": random.standard_t(4, (K, N)),
        "u": random.standard_t(4, (N, K)),
        "v": random.standard_t(4, (N, K)),
        "b": random.normal(size=N),
    }
    model.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), name) for name, a in held.items())
    return model


def samples(seed: int) -> FewSamples:
    """Return correlated inputs, as real ones are. Joint rounding uses the correlation."""
    random = np.random.default_rng(seed)
    mixing = np.random.default_rng(1).normal(size=(8, K))
    rows = random.normal(size=(20, 64, 8)) @ mixing + 0.2 * random.normal(size=(20, 64, K))
    return FewSamples(tuple(Sample(f"s{i}", {"x": batch.astype(np.float32)}) for i, batch in enumerate(rows)))


@pytest.fixture
def recoverer(tmp_path: Path) -> Recoverer:
    model = prepared(net(), tmp_path)
    return Recoverer(Job(model.source, model, samples(0), samples(0), False, None), resolve("cpu-any"), tmp_path)


def sqnr(model: Path, built: Path) -> float:
    exact, session = open_session(model), open_session(built)
    feeds = [dict(s.inputs) for s in samples(2)]
    return sqnr_db(*(np.concatenate([s.run(None, feed)[0].ravel() for feed in feeds]) for s in (exact, session)))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_held_out_samples_gain(tmp_path: Path, recoverer: Recoverer, bits: int, symmetric: bool) -> None:
    scheme = Scheme(mode="weight-only", weight_bits=bits, block_size=16, weight_symmetric=symmetric)
    plain = recoverer.build(scheme, [], tmp_path / "plain.onnx")
    better = recoverer.build(scheme, ["weight-rounding"], tmp_path / "better.onnx")
    source = tmp_path / "work" / "prepared.onnx"
    assert "3 products in blocks" in " ".join(better.artifact.notes)
    gain = sqnr(source, better.artifact.model) - sqnr(source, plain.artifact.model)
    assert gain > (2 if bits == 4 else -0.5)  # with 8 bits, most of the noise is the rounding of inputs


def test_products_of_eight_bits_among_four(tmp_path: Path, recoverer: Recoverer) -> None:
    scheme = Scheme(mode="weight-only", weight_bits=4, block_size=16, weight_symmetric=False, eight_bit=("second",))
    built = recoverer.build(scheme, ["weight-rounding"], tmp_path / "mixed.onnx")
    found = {n.name: n.attributes.get_int("bits") for n in read_model(built.artifact.model).graph if n.domain}
    assert found == {"first_Q4": 4, "second_Q8": 8, "third_Q4": 4}


def test_refuses_recoveries_that_need_static_schemes(tmp_path: Path, recoverer: Recoverer) -> None:
    scheme = Scheme(mode="weight-only", weight_bits=4)
    with pytest.raises(UsageError, match=r"needs a scheme that is static, not weight-only\. Use weight-rounding"):
        recoverer.build(scheme, ["sequential-correction"], tmp_path / "q.onnx")
    with pytest.raises(UsageError, match="no node is named 'nowhere'"):
        recoverer.build(scheme.replace(eight_bit=("nowhere",)), [], tmp_path / "q.onnx")
