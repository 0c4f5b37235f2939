"""Test `edgeq.quantization.block_weights`: int8 activations against the kernel, and the products that stay in float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from edgeq.backends.cpu import CpuBackend
from edgeq.data.records import Sample
from edgeq.errors import UsageError
from edgeq.model.load import read_model
from edgeq.model.prepare import PreparedModel
from edgeq.quantization.block_weights import (
    DETAIL,
    LEVEL,
    ProductNoise,
    block_products,
    fit_blocks,
    int8_rows,
    measure_noise,
    operands,
    read_blocks,
)
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from tests.backends.networks import prepared
from tests.graphs import attributes, proto
from tests.tuning.recover.nets import FewSamples

K, N, WILD = 64, 48, 3
NET = f"""
g (float[B,{K}] x) => (float[B,{N}] y, float[B,{N}] z) <float[{K},{N}] calm, float[{N},{K}] wild, float[{N}] b> {{
    [first] y = MatMul(x, calm) [spread] s = Mul(x, spike) [second] z = Gemm<transB = 1>(s, wild, b)
}}"""
FOUR = Scheme(mode="weight-only", weight_bits=4, block_size=32, weight_symmetric=False)


def net(spike: float) -> onnx.ModelProto:
    """Return two products of the same input. In the second one's input, one value is `spike` times the others. Its
    weights are 0.
    """
    random = np.random.default_rng(0)
    wild = random.normal(size=(N, K))
    wild[:, WILD] = 0
    scales = np.ones(K)
    scales[WILD] = spike
    held = {"calm": random.normal(size=(K, N)), "wild": wild, "b": random.normal(size=N), "spike": scales}
    return proto(NET, {name: a.astype(np.float32) for name, a in held.items()})


def samples() -> FewSamples:
    random = np.random.default_rng(1)
    return FewSamples(tuple(Sample(f"s{i}", {"x": random.normal(size=(32, K)).astype(np.float32)}) for i in range(4)))


def levels(model: ir.Model) -> dict[str, int | None]:
    return {name: node.attributes.get_int(LEVEL) for name, node in block_products(model).items()}


@pytest.fixture
def wild(tmp_path: Path) -> PreparedModel:
    return prepared(net(1000), tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("size", "k"), [(16, 48), (32, 75), (128, 100)])
def test_the_kernel_rounds_its_input_like_this(bits: int, symmetric: bool, size: int, k: int) -> None:
    random = np.random.default_rng(k)
    matrix = random.normal(size=(k, 24)).astype(np.float32)
    x = (random.standard_t(3, (5, k)) * np.exp(random.normal(size=k))).astype(np.float32)
    x[0, :size] = 0  # a block of zeros
    blocks = fit_blocks(matrix, bits, size, symmetric=symmetric)
    constants = operands(blocks)
    shape = {"K": k, "N": 24, "bits": bits, "block_size": size, LEVEL: 4}
    body = f"""product (float[5, {k}] x) => (float[5, 24] y) {{
        y = com.microsoft.MatMulNBits{attributes(shape)}({", ".join(["x", *constants])})
    }}"""
    model = proto(body, constants)
    made = open_session(model.SerializeToString()).run(None, {"x": x})[0]
    expected = int8_rows(x, size) @ blocks.matrix()
    noise = np.square(expected - x @ blocks.matrix()).sum()
    if np.square(made - x @ blocks.matrix()).sum() < 1e-6 * noise:
        pytest.skip("this machine's kernel expands the weights to float at every level")
    assert np.square(made - expected).sum() < 1e-3 * noise


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_with_outliers_computes_in_float(tmp_path: Path, wild: PreparedModel, bits: int) -> None:
    scheme = FOUR.replace(weight_bits=bits)
    artifact = CpuBackend().build(wild, {}, scheme, tmp_path / "q.onnx", samples=samples())
    assert levels(read_model(artifact.model)) == {"first": 4, "second": 1}
    assert artifact.scheme.float_compute == ("second",)
    assert "float compute in 1 node" in artifact.scheme.title
    compute = artifact.details[DETAIL]
    assert any("float in 1, where int8 activations bring more noise" in note for note in artifact.notes)
    by_type = {kind.compute: kind for kind in compute.kinds}
    assert by_type["int8"].activations_db < by_type["int8"].weights_db + (0 if bits == 4 else 25)
    assert by_type["float32"].activations_db > -20 if bits == 8 else by_type["float32"].weights_db


def test_noise_is_what_the_outputs_show(tmp_path: Path, wild: PreparedModel) -> None:
    artifact = CpuBackend().build(wild, {}, FOUR, tmp_path / "q.onnx", samples=samples())
    (found,) = (n for n in artifact.details[DETAIL].noise if n.name == "second")
    in_int8 = CpuBackend().build(wild, {}, FOUR.replace(float_compute=()), tmp_path / "i.onnx")
    bias = next(t for t in net(1000).graph.initializer if t.name == "b")
    feed = samples().samples[0].inputs
    z, f, q = (
        open_session(path).run(["z"], dict(feed))[0] - numpy_helper.to_array(bias)
        for path in (wild.path, artifact.model, in_int8.model)
    )
    assert found.weights == pytest.approx(np.square(f - z).sum() / np.square(z).sum(), rel=0.3)
    if not np.array_equal(f, q):  # true if the kernel multiplies integers on this machine
        assert found.activations == pytest.approx(np.square(q - f).sum() / np.square(z).sum(), rel=0.3)


def test_given_and_unmeasurable_levels_are_kept(tmp_path: Path, wild: PreparedModel) -> None:
    backend = CpuBackend()

    def built(scheme: Scheme, data: FewSamples | None = None) -> dict[str, int | None]:
        return levels(read_model(backend.build(wild, {}, scheme, tmp_path / "q.onnx", samples=data).model))

    assert built(FOUR) == {"first": 4, "second": 4}, "without samples"
    assert built(FOUR.replace(float_compute=()), samples()) == {"first": 4, "second": 4}
    assert built(FOUR.replace(float_compute=("first",)), samples()) == {"first": 1, "second": 4}
    everything = FOUR.replace(float_compute=("*",), eight_bit=("second",))
    assert built(everything, samples()) == {"first": 1, "second": 4}, "8 bits gain nothing in float"
    with pytest.raises(UsageError, match="no node is named 'frist'"):
        built(FOUR.replace(float_compute=("frist",)))


def test_calm_inputs_stay_in_int8(tmp_path: Path) -> None:
    artifact = CpuBackend().build(prepared(net(1), tmp_path), {}, FOUR, tmp_path / "q.onnx", samples=samples())
    assert levels(read_model(artifact.model)) == {"first": 4, "second": 4}
    assert artifact.scheme.float_compute == ()


def test_eight_bits_are_judged_by_what_four_would_lose() -> None:
    assert ProductNoise("n", 4, 0.01, 0.011).rounded_away
    assert not ProductNoise("n", 8, 0.01 / 289, 0.009).rounded_away
    assert ProductNoise("n", 8, 0.01 / 289, 0.011).rounded_away
    assert not ProductNoise("unmeasured", 4).rounded_away


def test_few_of_many_outputs_tell_the_same(
    tmp_path: Path, wild: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = CpuBackend().build(wild, {}, FOUR, tmp_path / "q.onnx", samples=samples())
    model = read_model(artifact.model)
    whole = measure_noise(model, wild, samples())
    monkeypatch.setattr("edgeq.quantization.block_weights._OUTPUTS", 16)
    for few, all_of_them in zip(measure_noise(model, wild, samples()), whole, strict=True):
        assert few.weights == pytest.approx(all_of_them.weights, rel=0.3)
        assert few.activations == pytest.approx(all_of_them.activations, rel=0.3)
    assert read_blocks(block_products(model)["first"]).of_outputs(np.array([2, 5])).matrix().shape == (K, 2)
