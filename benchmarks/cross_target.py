"""Check the limits for packaging for several targets in one run, and print rows of "limit, measured".

    python benchmarks/cross_target.py [--only SECTION ...] [--samples N]

Sections:
- kernels: compare edgeq's model of saturating kernels with emulated kernels, bit for bit.
- accuracy: for a CPU that saturates, compare the accuracy of edgeq's choice with that of exact kernels.
- bundle: compare the bytes of a bundle for five targets with the bytes of five models.
- time: compare the time to package for five targets with the time for one target.

Real data come from shared/data. If it does not exist, the rows that need it are left out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from models import resnet50_shaped
from tasks import shared_data

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the random operators come from the tests

from edgeq.data.open_source import Data  # noqa: E402
from edgeq.data.samples import open_samples  # noqa: E402
from edgeq.emulate.audit import KernelSimulation  # noqa: E402
from edgeq.jobs.package import package  # noqa: E402
from edgeq.jobs.quantize import quantize  # noqa: E402
from edgeq.measure.task import make_task  # noqa: E402
from edgeq.model.convert import to_bytes  # noqa: E402
from edgeq.model.graph import name_of  # noqa: E402
from edgeq.model.load import model_signature  # noqa: E402
from edgeq.model.parts import with_outputs  # noqa: E402
from edgeq.run.session import SessionSettings  # noqa: E402
from tests.emulate.saturation import cases  # noqa: E402
from tests.emulate.saturation.emulated_kernels import command, emulated  # noqa: E402
from tests.emulate.saturation.reference import simulate_layer  # noqa: E402

FIVE = ("raspberry-pi-4", "raspberry-pi-5", "graviton3", "haswell", "cascade-lake")
SATURATING, EXACT = "haswell", "cascade-lake"
MOBILENET = "mobilenet_v1_0.25_224"
Row = tuple[str, str, str]


def saturation_model(samples: int) -> Iterator[Row]:
    """Compare edgeq's model of saturating kernels with emulated kernels. The comparison covers 100 random operators of
    each kind, and every layer of a quantized CNN. One emulated process runs them all.
    """
    prefix = command()
    if not prefix:
        yield "saturation model against emulated kernels", "equal to the bit", "no qemu-user here"
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = folder / "models"
        models.mkdir()
        kinds = {
            "MatMulInteger": list(cases.matmul_integer(100)),
            "QLinearMatMul": list(cases.qlinear_matmul(100)),
            "QLinearConv": list(cases.qlinear_conv(100)),
            "other operators and types": list(cases.others()),
        }
        for case in itertools.chain.from_iterable(kinds.values()):
            case.save(models)
        network = _network(folder, models)
        found = emulated(models, folder / "out.npz", prefix)
        for kind, chosen in kinds.items():
            equal = sum(
                np.array_equal(found[f"{c.name}:y"], simulate_layer(ir.serde.deserialize_node(c.node), c.arrays))
                for c in chosen
            )
            yield f"saturation model against emulated kernels, random {kind}", "all", f"{equal} of {len(chosen)} equal"
        if network is not None:
            simulation, run = network
            equal = sum(
                np.array_equal(found[f"network:{layer.node.outputs[0].name}"], run.layers[layer.name].output)
                for layer in simulation.layers
            )
            yield f"the same, layers of {MOBILENET}", "all", f"{equal} of {len(simulation.layers)} equal"


def _network(folder: Path, models: Path) -> Any:
    """Write the optimised graph of a quantized CNN, which outputs every layer's result, into `models`. Return a
    simulation of this graph.
    """
    given = mobilenet()
    if given is None:
        return None
    source, calibration, validation, _ = given
    overrides = {"reduce_range": False}
    data = Data(calibration.source, calibration.preprocess, count=16)
    quantize(source, data, folder / "q.onnx", target=EXACT, overrides=overrides, timed=False)
    simulation = KernelSimulation(folder / "q.onnx", SessionSettings())
    samples = open_samples(validation.source, model_signature(source), preprocess=validation.preprocess, count=1)
    sample = next(iter(samples))
    names = [name_of(layer.node.outputs[0]) for layer in simulation.layers]
    (models / "network.onnx").write_bytes(to_bytes(with_outputs(simulation.graph.model, names)))
    np.savez(models / "network.npz", **dict[str, Any](sample.inputs))
    return simulation, simulation.run(sample.inputs)


def accuracy(samples: int) -> Iterator[Row]:
    """Measure the accuracy of edgeq's choice for a CPU that saturates."""
    given = mobilenet()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given is not None:
            source, calibration, validation, task = given
            data = Data(validation.source, validation.preprocess, count=samples)
            result = quantize(
                source, calibration, folder / "m.onnx", target=SATURATING, val=data, task=task, timed=False
            )
            decision = result.decision
            assert decision is not None
            assert decision.exact_metric is not None
            assert decision.chosen.metric is not None
            lost = 100 * (decision.exact_metric - decision.chosen.metric)
            yield (
                f"{MOBILENET}, {SATURATING}: {decision.chosen.name} (time x{decision.chosen.cost:g}), "
                f"points below exact kernels on {result.proof.samples} images",
                "0.5",
                f"{lost:.2f}",
            )
            yield from _mitigations(MOBILENET, decision)
        model = resnet50_shaped(folder / "resnet50.onnx")
        data = correlated_images(folder / "x.npz")
        result = quantize(model, data, folder / "r.onnx", target=SATURATING, timed=False)
        decision = result.decision
        assert decision is not None
        lost = decision.exact_db - decision.chosen.sqnr_db
        title = f"ResNet-50-shaped, {SATURATING}: {decision.chosen.name} (time x{decision.chosen.cost:g})"
        yield f"{title}, dB below exact kernels", "0.5", f"{lost:.2f}"
        yield from _mitigations("ResNet-50-shaped", decision)


def correlated_images(file: Path) -> Data:
    """Write 12 random images in which neighbouring pixels are similar, as in photographs."""
    random = np.random.default_rng(0)
    coarse = random.normal(size=(12, 3, 14, 14)).repeat(16, 2).repeat(16, 3)
    np.savez(file, input=(coarse + 0.3 * random.normal(size=(12, 3, 224, 224))).astype(np.float32))
    return Data(file)


def _mitigations(model: str, decision: Any) -> Iterator[Row]:
    for mitigation in decision.mitigations:
        metric = "" if mitigation.metric is None else f", {100 * mitigation.metric:.1f} points"
        yield f"  {model}: {mitigation.name}, time x{mitigation.cost:g}", "", f"{mitigation.sqnr_db:.1f} dB{metric}"


def bundle(samples: int) -> Iterator[Row]:
    """Compare the bytes of five targets' variants in one bundle with the bytes of five models."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, source, data, validation in _models(folder):
            overrides = {"reduce_range": False}  # one scheme for all targets, so that their weights are identical
            done = package(
                source, data, folder / "coincide", targets=FIVE, val=validation, overrides=overrides,
                timed=False, emulate=False, force=True,
            )  # fmt: skip
            yield f"{title}: models in the bundle / five models, weights coincide", "0.6", _ratio(done)
            done = package(
                source,
                data,
                folder / "chosen",
                targets=FIVE,
                val=validation,
                timed=False,
                emulate=False,
                force=True,
            )
            yield f"{title}: the same, by edgeq's choices ({done.models} different models)", "", _ratio(done)


def _ratio(done: Any) -> str:
    root = done.bundle
    inside = [*(root / "models").rglob("*"), *(root / "shared_assets").rglob("*")]
    held = sum(file.stat().st_size for file in inside if file.is_file())
    separate = sum(variant.bytes for variant in done.variants.values())
    return f"{held / separate:.2f} ({held / 1e6:.2f} of {separate / 1e6:.2f} MB)"


def timing(samples: int) -> Iterator[Row]:
    """Compare the time to package for five targets with the time to package for one target. The runs alternate and use
    the same data.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, source, data, validation in _models(folder):
            taken: dict[int, list[float]] = {1: [], 5: []}
            for _ in range(2):
                for targets in ((EXACT,), FIVE):
                    start = time.perf_counter()
                    package(source, data, folder / "b", targets=targets, val=validation, emulate=False, force=True)
                    taken[len(targets)].append(time.perf_counter() - start)
            one, five = min(taken[1]), min(taken[5])
            yield f"{title}: packaging five targets / one", "2.5", f"{five / one:.2f} ({five:.1f} of {one:.1f} s)"


def _models(folder: Path) -> Iterator[tuple[str, Path, Data, Data]]:
    given = mobilenet()
    if given is not None:
        source, calibration, validation, _ = given
        yield MOBILENET, source, calibration, Data(validation.source, validation.preprocess, count=200)
    else:
        from edgeq import demo

        yield "demo", demo.MODEL, Data(demo.CALIBRATION), Data(demo.VALIDATION)


def mobilenet() -> tuple[Path, Data, Data, Any] | None:
    """Return the model, calibration data, validation data and task, or None if there is no shared data."""
    root = shared_data()
    if root is None:
        return None
    spec = str(REPOSITORY / "benchmarks" / "specs" / f"{MOBILENET}.toml")
    images = root / "imagenet-sample"
    from edgeq.measure.task import TaskOptions

    task = make_task("classification", TaskOptions(class_offset=1))
    return root / MOBILENET / "model.onnx", Data(images / "calib", spec), Data(images / "val", spec), task


SECTIONS: dict[str, Callable[[int], Iterator[Row]]] = {
    "kernels": saturation_model, "accuracy": accuracy, "bundle": bundle, "time": timing,
}  # fmt: skip


def main() -> None:
    """Run the chosen sections and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--samples", type=int, default=900, help="number of validation images for accuracy")
    given = parser.parse_args()
    print(f"{'what':100} {'bar':>16} measured")
    for section in given.only:
        for what, bar, measured in SECTIONS[section](given.samples):
            print(f"{what:100} {bar:>16} {measured}", flush=True)


if __name__ == "__main__":
    main()
