"""Test what the backend builds, writes next to the model, and puts into a bundle."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeq.backends.espdl.arena import arena_bytes, memory_of
from edgeq.backends.espdl.backend import EspdlBackend
from edgeq.backends.espdl.chips import chip_named
from edgeq.backends.espdl.network import EspGraph, EspNode, EspPort, EspTensor
from edgeq.backends.espdl.preprocessing import preprocessing_lines
from edgeq.backends.espdl.project import FOLDER, PROJECT_FILE
from edgeq.backends.espdl.reader import read
from edgeq.data.preprocess import load_preprocess
from edgeq.errors import HardwareError, ModelError, UsageError
from edgeq.hardware.target import find_target, load_targets
from edgeq.scheme import Scheme
from tests.backends.build import random
from tests.backends.espdl.build import Built, built
from tests.backends.espdl.models import CONV, MODELS, W, image

TARGETS = [name for name, target in load_targets().items() if target.backend == "espdl"]


def backend(name: str = "esp32-s3") -> EspdlBackend:
    return EspdlBackend(find_target(name))


@pytest.fixture
def residual(tmp_path: Path) -> Built:
    return built(tmp_path, MODELS["residual"], target="esp32-s3")


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_names_a_chip_whose_family_fits_its_profile(name: str) -> None:
    target = find_target(name)
    assert backend(name).chip.name == name
    assert target.profile.name == f"espdl-{backend(name).chip.family}"
    assert target.profile.integer_only
    family, scheme = backend(name).family, target.profile.scheme
    assert (scheme.per_channel, scheme.bias_bits) == (family.per_channel, family.bias_bits)
    assert "not run" in target.profile.never_run or "chip" in target.profile.never_run


def test_an_unknown_chip_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(HardwareError, match="esp32-s4"):
        chip_named("esp32-s4")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"activation_symmetric": False}, "activation_symmetric"),
        ({"scale": "any"}, "scale"),
        ({"per_channel": True}, "one scale for each tensor"),
    ],
)
def test_a_scheme_that_the_kernels_cannot_run_is_refused(change: dict[str, object], problem: str) -> None:
    scheme: Scheme = find_target("esp32-s3").profile.scheme
    with pytest.raises(UsageError, match=problem):
        backend().check(scheme.replace(**change))


def test_all_layers_run_in_integers(residual: Built) -> None:
    assert residual.artifact.coverage is not None
    assert residual.artifact.coverage.float_macs == 0
    assert residual.artifact.coverage.int8_macs > 0


def test_a_node_without_a_kernel_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'e' \(Erf\).*ESP-DL has no float kernels"):
        built(tmp_path, image(f"{CONV} [e] z = Erf(c)", W))


def test_a_finished_build_has_a_file_with_test_values_and_a_forecast_of_memory(residual: Built, tmp_path: Path) -> None:
    folder = tmp_path / "finished"
    folder.mkdir()
    bench = residual.bench
    artifact = backend().finished(residual.artifact, bench.prepared, bench.samples, folder)
    file = artifact.files["int8.espdl"]
    content = read(file.read_bytes(), file)
    assert len(content.tests) >= 2 + 3
    assert backend().owns(file)
    assert any("KiB of RAM" in note for note in artifact.notes)


def test_a_bundle_has_a_project_that_flashes_and_checks_the_model(residual: Built, tmp_path: Path) -> None:
    artifact = backend().with_companions(residual.artifact, residual.bench.samples, tmp_path / "project", count=4)
    texts = {name: file.read_text("utf-8") for name, file in artifact.files.items() if name != PROJECT_FILE}
    assert not any("@" in text for name, text in texts.items() if not name.endswith("CMakeLists.txt"))
    assert "idf.py set-target esp32s3" in texts[f"{FOLDER}/README.md"]
    assert '">=3.3.9,<4"' in texts[f"{FOLDER}/main/idf_component.yml"]
    size = artifact.files[PROJECT_FILE].stat().st_size
    partition = int(texts[f"{FOLDER}/partitions.csv"].rsplit(",", 1)[1], 16)
    assert partition % (1 << 16) == 0
    assert size < partition <= size * 1.1 + (1 << 16)
    expected = json.loads(texts[f"{FOLDER}/expected.json"])
    assert np.array(expected["outputs"][0]["values"]).size == 5
    # The finished form must not store the model twice.
    folder = tmp_path / "finished"
    folder.mkdir()
    finished = backend().finished(artifact, residual.bench.prepared, residual.bench.samples, folder)
    assert [name for name in finished.files if name.endswith(".espdl")] == [PROJECT_FILE]


def test_the_header_has_the_arithmetic_of_the_preprocessing_as_one_scale_and_offset() -> None:
    steps = [
        {"op": "divide", "value": 255},
        {"op": "subtract", "value": [0.5, 0.25, 0.0]},
        {"op": "divide", "value": [0.25, 0.5, 1.0]},
    ]
    lines = preprocessing_lines(load_preprocess({"steps": steps}))
    constants = {line.split("[")[0].split()[-1]: line.split("{")[1].split("}")[0] for line in lines if "{" in line}
    scale, offset = (
        np.array([float(number.rstrip("f")) for number in constants[name].split(", ")])
        for name in ("kEdgeqScale", "kEdgeqOffset")
    )
    pixels = np.array([0.0, 100.0, 255.0])
    expected = (pixels / 255 - [0.5, 0.25, 0.0]) / [0.25, 0.5, 1.0]
    np.testing.assert_allclose(pixels * scale + offset, expected, rtol=1e-6, atol=1e-6)


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        result = built(tmp_path / name, MODELS["residual"], target="esp32-p4")
        files.append(tmp_path / f"{name}.espdl")
        backend("esp32-p4").write_file(result.artifact.model, files[-1])
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_simulator_answers_as_a_session_for_whole_batches(residual: Built) -> None:
    with backend().simulator()(find_target("esp32-s3")) as opener:
        session = opener(residual.artifact.model, residual.artifact.settings())
        x = random(3, 8, 8, 8, seed=5)
        (batch,) = session.run(None, {"x": x})
        rows = [session.run(["y"], {"x": x[i : i + 1]})[0] for i in range(3)]
    assert np.array_equal(batch, np.concatenate(rows))


def chain(sizes: list[int], kinds: list[str]) -> EspGraph:
    tensors = [EspTensor(f"t{i}", (size,), "int8") for i, size in enumerate(sizes)]
    nodes = [EspNode(kind, f"n{i}", (tensors[i],), (tensors[i + 1],)) for i, kind in enumerate(kinds)]
    ends = EspPort("x", tensors[0], (0,)), EspPort("y", tensors[-1], (0,))
    return EspGraph(ends[:1], ends[1:], tuple(nodes))


def test_a_chain_needs_the_largest_pair_of_neighbours() -> None:
    assert arena_bytes(chain([100, 64, 16], ["Conv", "Conv"])) == 112 + 64


def test_an_operator_in_place_needs_no_memory() -> None:
    assert arena_bytes(chain([64, 64, 64], ["Conv", "LUT"])) == 128
    assert arena_bytes(chain([64, 64], ["Reshape"])) == 64


@given(st.lists(st.integers(1, 500), min_size=2, max_size=9), st.data())
def test_the_arena_holds_both_tensors_of_every_node_and_never_more_than_all(
    sizes: list[int], data: st.DataObject
) -> None:
    kinds = [data.draw(st.sampled_from(["Conv", "MaxPool"])) for _ in sizes[1:]]
    arena = arena_bytes(chain(sizes, kinds))
    rounded = [-(-size // 16) * 16 for size in sizes]
    assert max(a + b for a, b in itertools.pairwise(rounded)) <= arena <= sum(rounded)


def test_weights_count_for_the_copy_in_memory(residual: Built) -> None:
    graph = residual.graph()
    weights = [tensor for tensor in graph.tensors() if tensor.layout]
    assert memory_of(graph, 100).weights >= sum(tensor.bytes for tensor in weights)
