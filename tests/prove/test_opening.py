"""Test that a file proven in simulation is also opened as devices open it, and refused if that changes its outputs."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from edgeq.backends.base import Alternative, Artifact
from edgeq.errors import CheckFailedError
from edgeq.hardware.target import resolve
from edgeq.prove.opening import Opening, open_stand_in
from edgeq.prove.proof import Proof, ProofSamples, prove
from edgeq.util.records import plain
from tests.backends.tensorrt.nets import Bench, bench, chain

OPTION = "optimization.disable_specified_optimizers=WeightBiasQuantization"


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench(tmp_path_factory.mktemp("opening"), chain("Conv"))


@pytest.fixture(scope="module")
def built(net: Bench) -> Artifact:
    return net.build()


def with_plain_biases(artifact: Artifact, place: Path) -> Artifact:
    """Return the artifact with every bias in its layer. ONNX Runtime requantizes this form in float16 at load."""
    proto = onnx.load(artifact.model)
    layers = {node.output[0]: node for node in proto.graph.node if node.op_type == "Conv"}
    for node in [node for node in proto.graph.node if node.op_type == "BatchNormalization"]:
        layer = layers[node.input[0]]
        layer.input.append(node.input[2])
        layer.output[0] = node.output[0]
        proto.graph.node.remove(node)
    place.write_bytes(proto.SerializeToString())
    return dataclasses.replace(artifact, model=place)


def proven(net: Bench, artifact: Artifact) -> Proof:
    assert artifact.coverage is not None
    return prove(net.prepared, artifact, ProofSamples(net.samples, held_out=True), artifact.coverage)


def test_a_file_that_opens_as_it_is_written_has_the_simulations_figures(net: Bench, built: Artifact) -> None:
    proof = proven(net, built)
    assert proof.opening.notes == ()
    assert proof.opening.claimed == pytest.approx(proof.agreement.sqnr_db)
    assert proof.optimiser == pytest.approx((proof.agreement.sqnr_db,) * 2, abs=0.5)
    assert plain(proof)["optimiser_sqnr_db"] == {"optimised": proof.optimiser[0], "unoptimised": proof.optimiser[1]}


def test_a_file_that_the_optimiser_breaks_is_refused_with_the_option_that_helps(
    net: Bench, built: Artifact, tmp_path: Path
) -> None:
    broken = with_plain_biases(built, tmp_path / "broken.onnx")
    with pytest.raises(CheckFailedError, match=rf"broken\.onnx: ONNX Runtime's optimiser changes .*{OPTION} it is 4\d"):
        proven(net, broken)
    name, _, value = OPTION.partition("=")
    cured = proven(net, dataclasses.replace(broken, session_options={name: value}))
    assert cured.optimiser == pytest.approx((cured.agreement.sqnr_db,) * 2, abs=0.5)


def test_a_file_that_is_not_what_was_simulated_is_refused(net: Bench, built: Artifact, tmp_path: Path) -> None:
    proto = onnx.load(built.model)
    scale = next(t for t in proto.graph.initializer if t.name.startswith("r1_scale"))
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) / 4, scale.name))
    other = tmp_path / "other.onnx"
    other.write_bytes(proto.SerializeToString())
    with pytest.raises(CheckFailedError, match="dB in simulation"):
        proven(net, dataclasses.replace(built, model=other))


def test_a_stand_in_is_held_to_the_same(net: Bench, built: Artifact, tmp_path: Path) -> None:
    cuda: Alternative = next(a for a in built.alternatives if a.artifact.simulation is not None)
    open_stand_in(cuda.artifact, net.prepared.path, net.samples).check(cuda.artifact.model)
    broken = with_plain_biases(built, tmp_path / "broken.onnx")
    with pytest.raises(CheckFailedError, match=r"broken\.onnx: ONNX Runtime's optimiser changes the outputs"):
        open_stand_in(broken, net.prepared.path, net.samples).check(broken.model)


def test_a_file_that_cannot_be_opened_here_is_named(net: Bench, tmp_path: Path) -> None:
    built = net.build(rest="bfloat16", target=resolve("nvidia-a100"))
    odd = with_plain_biases(built, tmp_path / "odd.onnx")
    proof = proven(net, dataclasses.replace(built, files={"odd.onnx": odd.model}))
    named = [note.partition(" was not run here: onnxruntime ")[0] for note in proof.opening.notes]
    assert named == ["the file for TensorrtExecutionProvider", "odd.onnx"]
    assert proof.optimiser == (proof.agreement.sqnr_db,) * 2


def test_a_note_names_a_file_by_what_stays_of_its_name_and_ends_with_a_word(net: Bench, tmp_path: Path) -> None:
    """The name of a file next to the model begins with that of the model, which differs in an output and a bundle."""
    built = net.build()
    proto = onnx.load(built.model)
    proto.graph.node[0].op_type, proto.graph.node[0].name = "NoSuchOperator", "word " * 100
    onnx.save(proto, tmp_path / "odd.onnx")
    files = {f"{built.model.stem}.dialect.onnx": tmp_path / "odd.onnx"}
    note = proven(net, dataclasses.replace(built, files=files)).opening.notes[-1]
    assert note.startswith("*.dialect.onnx was not run here: onnxruntime ")
    assert note.endswith(" word…'")


@pytest.mark.parametrize(
    ("opening", "loss", "refused"),
    [
        (Opening(30.0, 31.0), False, False),
        (Opening(20.0, 31.0), True, False),
        (Opening(2.0, 31.0), True, True),
        (Opening(2.0, 9.0), True, False),
        (Opening(2.0, 3.0), False, False),
        (Opening(70.0, math.inf), False, False),
        (Opening(-math.inf, 31.0), True, True),
        (Opening(30.0, 31.0, claimed=36.0), False, False),
        (Opening(20.0, 31.0, claimed=20.0), True, True),
        (Opening(20.0, 20.0, claimed=31.0), True, True),
        (Opening(2.0, 9.0, claimed=9.0), True, False),
        (Opening(math.inf, math.inf, claimed=math.inf), False, False),
    ],
)
def test_a_loss_is_a_warning_and_refused_where_the_proof_says_otherwise(
    opening: Opening, loss: bool, refused: bool
) -> None:
    assert opening.loss == loss
    if refused:
        with pytest.raises(CheckFailedError, match=r"m\.onnx: ONNX Runtime's optimiser changes the outputs"):
            opening.check(Path("m.onnx"))
    else:
        opening.check(Path("m.onnx"))
