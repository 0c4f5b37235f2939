"""Build and run every combination of file, engine and precision that a user could try by hand with one model on this
machine.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contenders import Built, edgeq_json
from edgeq_device.measure.claim import compute_ratio
from edgeq_device.measure.latency import Distribution, WarmUp, measure_interleaved
from edgeq_device.measure.scenarios import make_runner
from tune_cases import Case

from edgeq.measure.accuracy import evaluate_sessions
from edgeq.run.engines import load_engines
from edgeq.run.session import SessionSettings, start_engine

Feed = Mapping[str, Any]
Sessions = Mapping[str, Any]


class ByHand:
    """Run a model in the openvino package itself, with the interface of a session.

    Args:
        feed: inputs. The model is compiled for their sizes, or for free sizes if this is None.
    """

    def __init__(self, model: Path, precision: str, threads: int, feed: Feed | None = None) -> None:
        import openvino

        core = openvino.Core()
        network = core.read_model(str(model))
        if feed is not None:
            network.reshape({name: list(value.shape) for name, value in feed.items()})
        options = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": precision}
        options.update({"INFERENCE_NUM_THREADS": str(threads)} if threads else {})
        self._outputs = [SimpleNamespace(name=port.get_any_name()) for port in network.outputs]
        self._request = core.compile_model(network, "CPU", options).create_infer_request()

    def get_outputs(self) -> list[Any]:
        return self._outputs

    def run(self, names: Any, feed: Feed) -> list[Any]:
        del names  # always returns all the outputs
        return list(self._request.infer(dict(feed), share_inputs=True).to_tuple())


@dataclass(frozen=True)
class Way:
    """Describe one way to run a model: a file, an engine, and the precision in which the engine computes floats."""

    built: Built
    engine: str
    precision: str

    def __str__(self) -> str:
        return f"{self.built.name} in {self.engine}:{self.precision}"

    def open(self, runtime: Any, threads: int, feed: Feed | None = None) -> Any:
        """Open a session. onnxruntime runs in the process `runtime`, openvino in this process."""
        if self.engine == "openvino":
            return ByHand(self.built.model, self.precision, threads, feed)
        return runtime.open(self.built.model, SessionSettings(config=self.built.config, intra_op_threads=threads))


def ways(case: Case, folder: Path) -> list[Way]:
    """Return all the ways to run a case. Their files are made in `folder`, or reused if they are already there."""
    int8, report, nncf = folder / "int8.onnx", folder / "int8.json", folder / "nncf.xml"
    if not report.exists():
        data = ("--data", str(case.data), *case.preprocessing)
        made = edgeq_json("quantize", str(case.model), *data, "-o", str(int8))
        report.write_text(json.dumps(made["session_options"]), "utf-8")
    config = json.loads(report.read_text("utf-8"))
    files = [Built("float32", case.model), Built("edgeq's int8", int8, config)]
    if importlib.util.find_spec("nncf") is None:
        print("    NNCF's int8 is left out: pip install nncf")
    else:
        files.append(Built("NNCF's int8", nncf if nncf.exists() else _nncf_int8(case, nncf)))
    direct = [Way(file, "openvino", precision) for file in files for precision in ("f32", "bf16")]
    return [*(Way(file, "onnxruntime", "f32") for file in files[:2]), *direct]


def _nncf_int8(case: Case, output: Path) -> Path:
    """Quantize with NNCF, using the defaults that its documentation gives for this kind of model."""
    import nncf
    import openvino

    feeds = [dict(sample.inputs) for sample in case.open(case.data, case.count or 300)]
    kind = nncf.ModelType.TRANSFORMER if "attention_mask" in feeds[0] else None
    found = nncf.quantize(openvino.Core().read_model(str(case.model)), nncf.Dataset(feeds), model_type=kind)
    openvino.save_model(found, str(output), compress_to_fp16=False)
    return output


@contextmanager
def runtime() -> Iterator[Any]:
    """Start a process for onnxruntime's own kernels."""
    with start_engine(load_engines()["onnxruntime"]) as guest:
        yield guest


def accuracies(case: Case, sessions: Sessions) -> dict[str, float]:
    """Return the metric of each session. It is the average of two values: one for the samples that tuning saw, one for
    those that judge the result.
    """
    found = [
        evaluate_sessions(sessions, case.open(source), task=case.make_task()).accuracy
        for source in {case.tuned_on, case.judged_on}
    ]
    return {name: sum(part[name].value for part in found) / len(found) for name in sessions}


def race(sessions: Sessions, feed: Feed, each_s: float = 2.0, patience_s: float = 60.0) -> dict[str, Distribution]:
    """Time all sessions in interleaved runs and return their latencies. On a busy machine, this takes up to
    `patience_s` longer to get undisturbed rounds.
    """
    runners = {name: make_runner(session, [feed]) for name, session in sessions.items()}
    return measure_interleaved(runners, min_duration_s=each_s, patience_s=patience_s, warmup=WarmUp(max_s=1))


def times(slower: Distribution, faster: Distribution) -> float:
    """Return the ratio of two latencies from one call of `race`. If there was no round in which both were undisturbed,
    return the ratio of their p50 over all rounds.
    """
    found = compute_ratio(slower, faster)
    return float(found.estimate) if found.pairs else slower.p50 / faster.p50
