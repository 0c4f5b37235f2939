"""Check whether the accuracy that `edgeq tune` promises is kept on samples that it did not see.

    python benchmarks/halves.py [--only NAME ...] [--splits 5] [--max-drop 0.01 ...] [--json FILE]

Several int8 models of each case run once over all labelled samples, and their outputs are stored. For each random
split, the decision of `tune` is made on one half, and the chosen model is judged on the other half. Then the two halves
are swapped. The decision uses no timings. Among the models that keep the accuracy, `tune` chooses the one with the most
layers in int8. No model is built twice.

The metrics are top-1, mAP, AUC and F1. The uncertainty of top-1 comes from one score per sample, that of mAP and AUC
from values recomputed over random halves. F1 is a task that this file defines. Its meter has only the methods `update`
and `result`. The detector's candidates are stored float32 boxes to which errors are added in steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.answers.objects import suppress
from tasks import required_data
from tune_cases import Case, cases
from tuned import verdict

from edgeq.data.open_source import Data
from edgeq.data.sample import Sample
from edgeq.hardware.target import resolve
from edgeq.measure.boxes import Detections
from edgeq.measure.comparison import OutputSums
from edgeq.measure.inference import Outputs, infer
from edgeq.measure.resample import ResampledMeter
from edgeq.measure.rows import split_rows
from edgeq.measure.task import Task
from edgeq.measure.tasks.detection import Detection, input_size
from edgeq.model.macs import node_macs
from edgeq.prove.prepare import collect_statistics, prepare
from edgeq.prove.request import Request
from edgeq.run.session import open_session
from edgeq.scheme import Scheme
from edgeq.tuning.accuracy_estimate import AgreementEstimate, assess
from edgeq.tuning.budget import BudgetClock
from edgeq.tuning.goal import Goal
from edgeq.tuning.judge import choose_best
from edgeq.tuning.local import LocalEvaluator
from edgeq.tuning.measurements import Screening
from edgeq.tuning.recover.methods import recovery_groups
from edgeq.tuning.space import Candidate, in_float, kernel_candidates, method_candidates
from edgeq.tuning.trials import Trials

BAR = 0.1
FLOAT = "float32"
MOST = 900
"""Largest number of samples in a case."""
KEPT = (2, 4, 8)
"""One layer in this many stays in int8. So a model that loses much in int8 has candidates that come closer to float32
in steps.
"""


class F1:
    """Measure the F1 score of class 1 for a model with two classes. This metric has no score for each sample."""

    name, primary, higher_is_better, classes = "f1", "f1", True, True

    def start(self) -> F1Meter:
        return F1Meter()


class F1Meter:
    """Count the outputs of one model for F1."""

    def __init__(self) -> None:
        self._right = self._said = self._wanted = 0

    def update(self, outputs: Outputs, sample: Sample) -> None:
        said, wanted = int(next(iter(outputs.values())).argmax()), int(np.asarray(sample.label).reshape(-1)[0])
        self._right += said == wanted == 1
        self._said += said == 1
        self._wanted += wanted == 1

    def result(self) -> Mapping[str, float]:
        return {"f1": 2 * self._right / max(1, self._said + self._wanted)}


@dataclass
class Stored:
    """Hold every model's outputs for every sample, reduced to the parts that the task uses."""

    case: str
    task: Task
    samples: list[Sample]
    outputs: dict[str, list[Outputs]]
    screenings: dict[str, tuple[Candidate, Screening]]


def collect(case: Case, task: Task, workdir: Path) -> Stored:
    """Build the candidates of a case, run each candidate once, and return the outputs."""
    target = resolve("auto")
    validation = Data(case.judged_on, case.preprocess, count=MOST)
    request = Request(case.model, Data(case.data, case.preprocess, count=case.count), validation)
    job = collect_statistics(prepare(request, workdir))
    evaluator = LocalEvaluator(job, target, workdir / "tune", counts=True)
    layers = [name for name, macs in node_macs(job.prepared.model).items() if macs]
    kernels = kernel_candidates(target.profile)
    methods = method_candidates(kernels[0], target.profile)
    base = methods[1] if len(methods) > 1 else kernels[0]
    names = recovery_groups()[0]
    recovered = base.replace(name=f"{base.name} + recovery", recoveries=names)
    tried = [*kernels[:2], *methods[:3], recovered]
    if isinstance(task, Detection) and task.decoder is not None:
        tried = [kernels[0], *methods[:2]]
    for every in KEPT if not isinstance(task, Detection) else ():
        mixed = in_float(recovered, [n for i, n in enumerate(layers) if i % every != every - 1])
        tried.append(mixed.replace(name=f"{recovered.name}, one layer of {every} in int8"))
    sessions: dict[str, Any] = {FLOAT: open_session(job.prepared.path)}
    screenings = {}
    for candidate in tried:
        screenings[candidate.name] = (candidate, evaluator.build(candidate))
        artifact = evaluator.built(candidate).artifact
        sessions[candidate.name] = open_session(artifact.proof_model, artifact.proof_settings())
    stored = Stored(case.name, stored_task(task), [], {name: [] for name in sessions}, screenings)
    for batch in job.validation:
        made = {name: infer(session, batch, model=name) for name, session in sessions.items()}
        for sample, outputs in split_rows(batch, made):
            kept = None
            for name, found in outputs.items():
                kept, compact = reduce(task, sample, found)
                stored.outputs[name].append(compact)
            assert kept is not None
            stored.samples.append(kept)
    if isinstance(task, Detection) and task.decoder is not None:
        add_disturbed(stored)
    return stored


def add_disturbed(stored: Stored) -> None:
    """Add candidates for a detector. Each consists of float32's boxes with slightly changed positions and scores. Their
    losses range from 12 points to none.

    Without a search for its sensitive layers, a quantized YOLOX-Nano loses 7 points or more. With such models there
    would be nothing to decide.
    """
    draw = np.random.default_rng(0)
    for step, amount in enumerate((0.8, 0.6, 0.45, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05)):
        name = f"boxes disturbed by {amount}"
        made: list[Outputs] = []
        for found in stored.outputs[FLOAT]:
            boxes, scores = found["boxes"], np.clip(found["scores"], 1e-6, 1 - 1e-6)
            raised = np.log(scores / (1 - scores)) + draw.normal(0, amount, scores.shape)
            moved = boxes + np.tile(boxes[:, 2:] - boxes[:, :2], 2) * draw.normal(0, 0.11 * amount, boxes.shape)
            made.append({"boxes": moved, "scores": 1 / (1 + np.exp(-raised)), "classes": found["classes"]})
        stored.outputs[name] = made
        stored.screenings[name] = Candidate(name, Scheme()), Screening(1, name, name, 1 - step / 20, 20.0)


def reduce(task: Task, sample: Sample, outputs: Outputs) -> tuple[Sample, Outputs]:
    """Return a sample and a model's outputs, both reduced. With the reduced outputs, `stored_task` still gives the same
    figures as `task`.
    """
    if isinstance(task, Detection) and task.decoder is not None:
        found = suppress(task.decoder(outputs, input_size(sample)), task.confidence, task.iou, task.limit)
        return sample, {"boxes": found.boxes, "scores": found.scores, "classes": found.classes}
    if task.name == "anomaly":
        given, made = next(iter(sample.inputs.values())), next(iter(outputs.values()))
        error = ((np.asarray(given, np.float64) - made) ** 2).mean()
        return dataclasses.replace(sample, inputs={"x": np.zeros((1, 1))}), {"y": np.full((1, 1), error**0.5)}
    return dataclasses.replace(sample, inputs={}), outputs


def stored_task(task: Task) -> Task:
    """Return `task` in a form that works on the outputs of `reduce`."""
    if isinstance(task, Detection) and task.decoder is not None:
        return dataclasses.replace(
            task, decoder=lambda o, size: Detections(o["boxes"], o["scores"], np.asarray(o["classes"], np.int64))
        )
    return task


def meter(stored: Stored, name: str, chosen: Sequence[int]) -> ResampledMeter:
    """Return a meter that contains a model's stored outputs for the chosen samples."""
    found = ResampledMeter(stored.task)
    for i in chosen:
        found.update(stored.outputs[name][i], stored.samples[i])
    return found


def decide_on(stored: Stored, chosen: Sequence[int], goals: Sequence[float]) -> dict[float, list[str]]:
    """Return, for each allowed loss, the model that `tune` would choose on these samples, followed by all models that
    qualify.
    """
    reference = meter(stored, FLOAT, chosen).measured()
    assessments = {}
    for name in stored.screenings:
        agreement = AgreementEstimate(OutputSums(stored.task))
        for i in chosen:
            pair = (stored.outputs[FLOAT][i], stored.outputs[name][i])
            if isinstance(stored.task, Detection):
                pair = ({"y": np.zeros(1)}, {"y": np.zeros(1)})
            agreement.update(*pair, stored.samples[i])
        labels = stored.task, reference, meter(stored, name, chosen).measured()
        assessments[name] = assess(agreement, labels, complete=True)
    found = {}
    for goal in goals:
        table = Trials(Counted(), Goal(max_drop=goal), BudgetClock(None))  # type: ignore[arg-type]
        for name, (candidate, screening) in stored.screenings.items():
            table.add(candidate)
            table.record_screening(name, screening)
            table.update(name, assessment=assessments[name])
        qualified = [t.name for t in table.qualified()]
        choose_best(table, (0,))
        found[goal] = [t.name for t in table if t.status == "chosen"] + qualified
    return found


class Counted:
    """Provide the parts of an evaluator that `decide` needs if nothing is timed."""

    counts = True

    def simulate(self, candidate: Candidate, max_drop: float, seconds: float) -> None:
        """Do nothing, because nothing simulates the target."""


def loss(stored: Stored, name: str, chosen: Sequence[int]) -> float:
    """Return the loss of a model against float32 on the chosen samples, in the metric's own scale. The loss is positive
    if the model is worse.
    """
    values = []
    for model in (FLOAT, name):
        whole = stored.task.start()
        for i in chosen:
            whole.update(stored.outputs[model][i], stored.samples[i])
        values.append(whole.result()[stored.task.primary])
    return (values[0] - values[1]) * (1 if stored.task.higher_is_better else -1)


def run(stored: Stored, splits: int, goals: Sequence[float], first: int = 0) -> list[dict[str, Any]]:
    """Return one row for each allowed loss. The row contains the number of decisions, and how many of the chosen models
    lost more than the allowed loss on the other half.
    """
    counts = {goal: {"decided": 0, "exceeded": 0, "qualified": 0, "qualified_exceeded": 0} for goal in goals}
    lost: dict[float, list[float]] = {goal: [] for goal in goals}
    for seed in range(first, first + splits):
        order = list(range(len(stored.samples)))
        random.Random(seed).shuffle(order)
        parts = order[: len(order) // 2], order[len(order) // 2 :]
        for seen, unseen in (parts, parts[::-1]):
            judged: dict[str, float] = {}
            for goal, names in decide_on(stored, seen, goals).items():
                for place, name in enumerate(names):
                    if name not in judged:
                        judged[name] = loss(stored, name, unseen)
                    kind = "qualified" if place else "decided"
                    counts[goal][kind] += 1
                    counts[goal]["exceeded" if not place else "qualified_exceeded"] += judged[name] > goal
                    if not place:
                        lost[goal].append(judged[name])
    rows_: list[dict[str, Any]] = [
        {"case": stored.case, "metric": stored.task.primary, "samples": len(stored.samples), "max_drop": goal}
        | counts[goal]
        | {"of": 2 * splits, "worst": max(lost[goal], default=0.0)}
        for goal in goals
    ]
    for row in rows_:
        print(
            f"  {row['case']:>12} {row['metric']:>9}  half of {row['samples']:4}  allowed {100 * row['max_drop']:.2f}  "
            f"chosen {row['decided']:2} of {row['of']}, exceeded {row['exceeded']}, worst {100 * row['worst']:.2f}  "
            f"(all that qualified: {row['qualified_exceeded']} of {row['qualified']})",
            flush=True,
        )
    return rows_


def main() -> None:
    """Run all splits of the chosen cases, then print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=(), help="cases whose names begin with these")
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first split")
    parser.add_argument("--max-drop", type=float, nargs="+", default=(0.005, 0.01, 0.02))
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    root = required_data()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case, task in measured(list(cases(root, Path(folder) / "halves"))):
            if options.only and not any(name.startswith(wanted) for wanted in options.only):
                continue
            workdir = Path(folder) / name
            workdir.mkdir()
            found += run(
                collect(dataclasses.replace(case, name=name), task(), workdir), options.splits, options.max_drop
            )
    decided, exceeded = (sum(row[key] for row in found) for key in ("decided", "exceeded"))
    share = exceeded / max(1, decided)
    verdict(f"the loss allowed is exceeded {exceeded} times of {decided}", share <= BAR, f"at most {BAR:.0%}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def measured(known: Sequence[Case]) -> list[tuple[str, Case, Callable[[], Task]]]:
    """Return the name, the case and the task for each metric to measure."""
    by_name = {case.name: case for case in known}
    found: list[tuple[str, Case, Callable[[], Task]]] = [
        (name, by_name[name], by_name[name].make_task) for name in ("yolox_nano", "ad", "kws", "resnet20")
    ]
    found.append(("vww, F1", by_name["vww"], F1))
    whole = by_name["mobilenet, first half"]
    images = whole.data.parent / "val"
    found.append(("mobilenet", dataclasses.replace(whole, judged_on=images), whole.make_task))
    return found


if __name__ == "__main__":
    main()
