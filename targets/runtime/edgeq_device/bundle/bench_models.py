"""Open models and return a report on them: pin the cores, open the models, measure memory, find samples, and run the
benchmark.

`edgeq bench` and `edgeq_run.py bench` share this code, whatever kind of model they open.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from edgeq_device.bundle.opening import open_best, open_variant
from edgeq_device.bundle.package import FLOAT, Bundle
from edgeq_device.engines.device import Device
from edgeq_device.engines.memory import MemoryUse, measure_memory
from edgeq_device.engines.runtime import onnxruntime
from edgeq_device.engines.serve import build_open_request
from edgeq_device.engines.variant import Variant
from edgeq_device.errors import DataError, RuntimeUnavailableError
from edgeq_device.measure.bench import OnProgress, Report, run_bench
from edgeq_device.measure.bench_settings import BenchSettings
from edgeq_device.measure.cores import pinned
from edgeq_device.measure.scenarios import Feed
from edgeq_device.prepare.arrays import read_arrays
from edgeq_device.prepare.feeds import draw_feeds

Shapes = Mapping[str, Tuple[int, ...]]


@dataclass(frozen=True)
class BenchModel:
    """Describe one model to measure.

    Attributes:
        name: name of the model in the report.
        open: function that takes the number of intra-op threads (0: onnxruntime's choice) and returns a session.
        memory: function that takes the number of threads and the input shapes, measures the memory use in a separate
            process, and returns it; None skips the measurement.
        sessions: number of sessions in which the model is timed; they take turns (see `latency.Runners`).
        open_in_process: function that takes the number of threads and the number of a process, 1 or more, and returns a
            session in that process; None opens the further sessions with `open`.
    """

    name: str
    open: Callable[[int], Any]
    memory: Optional[Callable[[int, Shapes], MemoryUse]] = None
    sessions: int = 1
    open_in_process: Optional[Callable[[int, int], Any]] = None

    def open_further(self, threads: int) -> List[Any]:
        """Return the sessions after the first one."""
        open_session = self.open_in_process or (lambda threads, process: self.open(threads))
        return [open_session(threads, process) for process in range(1, self.sessions)]


def bench_models(
    models: Sequence[BenchModel],
    settings: BenchSettings,
    *,
    feeds: Optional[Callable[[Any], Sequence[Feed]]] = None,
    shapes: Optional[Shapes] = None,
    notes: Sequence[str] = (),
    on_progress: OnProgress = lambda scenario, share: None,
) -> Report:
    """Open the models and measure them side by side.

    Args:
        settings: settings of the measurement. If `pin` is set and `threads` is not, each pinned core gets one thread.
            By itself, onnxruntime would choose one thread for each core of the machine, and put them all on the pinned
            cores.
        feeds: function that takes the first session and returns the samples; None makes samples up from the session's
            inputs.
        shapes: shapes of inputs with open sizes, for made-up samples.
        notes: remarks on how the models were chosen, for the report.

    Returns:
        `run_bench`'s report.

    Raises:
        UsageError, DataError: for the same reasons as `run_bench`. DataError is also raised if the models do not have
            the same inputs.
        Exception: any error that `BenchModel.open` raises.
    """
    settings.check()
    runtime = str(onnxruntime().__version__)
    versions = {"python": platform.python_version(), "onnxruntime": runtime, "numpy": np.__version__}
    settings = replace(settings, threads=settings.threads or len(settings.pin))
    remarks: List[str] = []
    with pinned(settings.pin):
        sessions = {bench_model.name: bench_model.open(settings.threads) for bench_model in models}
        # Open the further sessions last, so that a model that does not open stops the benchmark early.
        more = {m.name: m.open_further(settings.threads) for m in models}
        remarks += [note for session in sessions.values() for note in getattr(session, "notes", ())]
        # One set of samples goes into all models, so their inputs must agree.
        _check_same_inputs(sessions)
        session = next(iter(sessions.values()))
        samples = list(feeds(session) if feeds else draw_feeds(session, shapes))
        # The process that measures the memory makes up its inputs, in the shapes of the samples.
        actual = {name: tuple(value.shape) for name, value in samples[0].items()} if samples else {}
        memory: Dict[str, Dict[str, int]] = {}
        for name, measure in ((model.name, model.memory) for model in models if model.memory is not None):
            try:
                memory[name] = measure(settings.threads, actual).to_dict()
            # The timings are worth having without the memory.
            except RuntimeUnavailableError as error:
                remarks.append(str(error))
        report = run_bench(
            sessions, samples, settings, more=more, memory=memory, versions=versions, on_progress=on_progress
        )
    if feeds is None:
        remarks.append(_made_up_note(session, shapes or {}, actual))
    report["notes"] = [*notes, *report["notes"], *remarks]
    return report


def _made_up_note(session: Any, shapes: Shapes, actual: Shapes) -> str:
    open_inputs = [i.name for i in session.get_inputs() if not all(isinstance(size, int) for size in i.shape[1:])]
    sized = [f"{name} of {','.join(map(str, actual[name]))}" for name in open_inputs if name not in shapes]
    sizes_note = f", with 1 for open sizes ({'; '.join(sized)}; --shape NAME=SIZES sets others)" if sized else ""
    return f"the inputs were made up (random values{sizes_note}); give data to time real ones"


def _check_same_inputs(sessions: Mapping[str, Any]) -> None:
    described = {name: sorted((i.name, i.type) for i in s.get_inputs()) for name, s in sessions.items()}
    reference = next(iter(described))
    for name, inputs in described.items():
        if inputs != described[reference]:
            reference_inputs, other_inputs = (
                ", ".join(f"{n}: {t}" for n, t in described[k]) for k in (reference, name)
            )
            raise DataError(
                f"{reference} takes {reference_inputs}, and {name} takes {other_inputs}",
                "Compare models that take the same inputs",
            )


def choose_variants(
    bundle: Bundle, device: Device, name: Optional[str] = None
) -> Tuple[List[Variant], Tuple[str, ...]]:
    """Return the variants to measure, and the reason why each better variant was passed over.

    If the bundle has a float32 variant that runs here, it comes first. Then comes the best variant, or the variant that
    `name` selects.

    Raises:
        BundleError: nothing in the bundle runs on this device, or the variant `name` does not.
    """
    best = open_best(bundle, device, name=name)
    variants = [best.choice.variant]
    if FLOAT in bundle.components:
        # The baseline comes first in the report.
        variants.insert(0, open_best(bundle, device, component=FLOAT).choice.variant)
    return variants, best.passed_over


def build_bench_models(variants: Sequence[Variant]) -> List[BenchModel]:
    """Return a benchmark model for each variant. The model has the variant's name, except that variants of the
    component "float32" are named "float32".
    """
    return [
        BenchModel(
            FLOAT if variant.component == FLOAT else variant.name,
            partial(open_variant, variant),
            partial(_measure_variant, variant),
        )
        for variant in variants
    ]


def find_feeds(variants: Sequence[Variant]) -> Optional[Callable[[Any], Sequence[Feed]]]:
    """Return a function that provides the inputs of the self-test as samples, for the argument `feeds` of
    `bench_models`. Return None if the variants have no self-test.
    """
    cases = [case for variant in variants for case in variant.cases]
    if not cases:
        return None
    # Variants share vectors, and a sample that is listed twice would count twice.
    paths = sorted({case.inputs for case in cases})
    return lambda session: [read_arrays(path) for path in paths]


def _measure_variant(variant: Variant, threads: int, shapes: Shapes) -> MemoryUse:
    return measure_memory(build_open_request(variant, threads), shapes)
