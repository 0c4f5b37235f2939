"""Compare plug-in kernels that add two products in 16 bits with edgeq's model of these kernels, and check edgeq's
choices.

`scripts/benchmark engine_saturation [--only layers|accuracy] [--layers N] [--seed N] [--samples N]`

layers: compares 100 random MatMul layers and 100 random Conv layers with the model, bit for bit. This is done at each
instruction set level below VNNI to which the engine can be capped. "plain" means no groups, padding or strides, and at
most 256 products in a MatMul. "small" means weights of at most 64. "fitted" means weights from `fit_pairs`. No kernel
may saturate on "small" and "fitted".

accuracy: measures the choices of `edgeq quantize` for a CPU that saturates and for one that does not. Each choice is
measured in the engine, capped to that CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the random layers come from the tests

from cross_target import EXACT, MOBILENET, SATURATING, correlated_images, mobilenet
from models import resnet50_shaped
from tuned import verdict

from edgeq.data.open_source import Data
from edgeq.data.samples import open_samples
from edgeq.emulate.check import find_route
from edgeq.hardware.detect import detect_machine
from edgeq.hardware.target import resolve
from edgeq.jobs.quantize import quantize
from edgeq.measure.accuracy import Evaluation, evaluate_sessions
from edgeq.measure.task import Task
from edgeq.model.load import model_signature
from edgeq.run.engines import Engine, EngineChoice, load_engines
from edgeq.run.session import SessionSettings, open_session
from tests.emulate.saturation.engine_layers import compare, saturating_levels

TOLERATED = 0.5
"""Allowed loss against the engine with VNNI, in decibels or in points of the task's metric."""


def layers(engine: Engine, count: int, seed: int) -> None:
    """Compare random layers in the engine with edgeq's model of its kernels, and print the differences."""
    for environment in saturating_levels(engine):
        for op in ("MatMul", "Conv"):
            where = " ".join(f"{key}={value}" for key, value in environment.items())
            for kind in ({"plain": True}, {}, {"small": True}, {"fitted": True}):
                wrong = compare(engine, environment, op, count, seed, **kind)
                what = f"{op} {next(iter(kind), 'any')}"
                print(f"{engine.name} {where} {what}: {count - len(wrong)} of {count} to the last bit")
                print("\n".join(f"  {line}" for line in wrong), end="\n" if wrong else "", flush=True)


def accuracy(engine: Engine, count: int) -> None:
    """Print the quality of edgeq's choice for a CPU that saturates, compared with edgeq's choice for an exact CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, model, data, validation, task in _models(folder, count):
            found: dict[str, tuple[float, float | None]] = {}
            for target in (EXACT, SATURATING):
                file = folder / f"{title}-{target}.onnx"
                made = quantize(
                    model, data, file, target=target, val=validation, task=task, engine=EngineChoice(engine),
                    timed=False, emulate=False,
                )  # fmt: skip
                how, evaluation = _measured(engine, target, model, file, validation, task)
                metric = evaluation.accuracy["int8"].value if evaluation.accuracy else None
                found[target] = evaluation.agreement["int8"].sqnr_db, metric
                decided = f": {made.decision.why}" if made.decision else ""
                points = "" if metric is None else f", {100 * metric:.2f} points"
                print(f"{title}, {target}, {how}: {found[target][0]:.2f} dB{points} on {evaluation.samples}{decided}")
                for m in made.decision.mitigations if made.decision else ():
                    points = "" if m.metric is None else f", {100 * m.metric:.2f} points"
                    print(f"    {m.name}: {m.sqnr_db:.2f} dB{points}{'' if m.safe else ', can saturate'} {m.failed}")
            (exact_db, exact), (db, metric) = found[EXACT], found[SATURATING]
            lost = exact_db - db if exact is None or metric is None else 100 * (exact - metric)
            verdict(f"{lost:.2f} below VNNI", lost <= TOLERATED, f"{TOLERATED}")


def _measured(
    engine: Engine, target: str, model: Path, file: Path, validation: Data, task: Task | None
) -> tuple[str, Evaluation]:
    machine = detect_machine()
    route = find_route(resolve(target, machine), machine, engine)
    assert route.start is not None, route.reason
    samples = open_samples(
        validation.source, model_signature(model), preprocess=validation.preprocess, count=validation.count
    )
    with route.start() as running:
        sessions = {"float32": open_session(model), "int8": running.open(file, SessionSettings(engine=engine))}
        return route.how, evaluate_sessions(sessions, samples, task=task, reference="float32")


def _models(folder: Path, count: int) -> Iterator[tuple[str, Path, Data, Data, Task | None]]:
    given = mobilenet()
    if given is not None:
        source, calibration, validation, task = given
        yield MOBILENET, source, calibration, Data(validation.source, validation.preprocess, count=count), task
    model, data = resnet50_shaped(folder / "resnet50.onnx"), correlated_images(folder / "x.npz")
    yield "ResNet-50-shaped", model, data, data, None


def main() -> None:
    """Run the chosen sections for every engine with saturating kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("layers", "accuracy"), default=["layers", "accuracy"])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=900, help="number of validation images for accuracy")
    given = parser.parse_args()
    for engine in load_engines().values():
        if engine.int8.saturation and "layers" in given.only:
            layers(engine, given.layers, given.seed)
        if engine.int8.saturation and "accuracy" in given.only:
            accuracy(engine, given.samples)


if __name__ == "__main__":
    main()
