"""Run main.py of MLPerf inference's vision benchmark with edgeq: python -m edgeq.compat.mlperf.

    python -m edgeq.compat.mlperf --profile resnet50-onnxruntime --model resnet50.onnx --dataset-path imagenet/ \\
        --accuracy --count 500
    python -m edgeq.compat.mlperf onnxruntime resnet50 cpu --accuracy --count 5000        # as in run_local.sh

With --accuracy, the command measures top-1 or mean average precision over the first --count items. Without it, the
command measures latency and throughput in a scenario. It measures in the same way as `edgeq eval` and `edgeq bench`.
The result is not a submission, and loadgen is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from edgeq_device.measure.bench_settings import BenchSettings

from edgeq.compat._command import OneLineCommand, run_program
from edgeq.compat._options import SETTINGS, OneOf
from edgeq.compat._printing import PrintedProgress, say
from edgeq.data.samples import open_samples, take_first
from edgeq.errors import OutputError, UsageError
from edgeq.measure.bench import BenchData, bench
from edgeq.measure.evaluation import EvalRequest, run_evaluation
from edgeq.measure.task import TaskOptions
from edgeq.model.load import model_signature
from edgeq.run.session import SessionSettings
from edgeq.util.device_errors import device_errors
from edgeq.util.marker import read_object
from edgeq.util.outputs import output_file
from edgeq.util.ownership import printable_path
from edgeq.util.record_files import toml_table
from edgeq.util.registry import DECODERS

SCENARIOS = {
    "SingleStream": "single-stream",
    "MultiStream": "multi-stream",
    "Server": "server",
    "Offline": "offline",
}
VAL_MAP = "val_map.txt"
"""Name of the benchmark's file of ImageNet labels, which is next to the images. Each line has a file name and a
class.
"""
# The benchmark's models and data sets are data, so a new one needs no code.
_TABLES = toml_table(Path(__file__).with_suffix(".toml"), UsageError, "Install edgeq again")
DATASETS: Mapping[str, Mapping[str, Any]] = _TABLES["datasets"]
PROFILES: Mapping[str, str] = _TABLES["profiles"]
FILES: Mapping[str, str] = _TABLES["files"]
# The words that run_local.sh passes and that have only one possible value here.
BACKEND = "onnxruntime"
DEVICE = "cpu"


@click.command("mlperf", cls=OneLineCommand, context_settings=SETTINGS)
@click.argument("words", nargs=-1, metavar="[onnxruntime MODEL [cpu]]")
@click.option("--model", type=click.Path(path_type=Path), help="Model, or a bundle. [the file in $MODEL_DIR]")
@click.option("--dataset-path", type=click.Path(path_type=Path), help="Folder of the data set. [$DATA_DIR]")
@click.option("--dataset", type=click.Choice(list(DATASETS)), help="Kind of data set. [the profile's]")
@click.option("--dataset-list", help=f"ImageNet: file of names and classes [{VAL_MAP}]; COCO: instances file.")
@click.option("--profile", type=click.Choice(list(PROFILES)), default="defaults", help="Model of the benchmark.")
@click.option(
    "--backend", type=click.Choice([BACKEND]), default=BACKEND, help="Accepted: there is only one.", expose_value=False
)
@click.option(
    "--scenario", type=OneOf(click.Choice([*SCENARIOS])), default="SingleStream", help="Scenario for measuring speed."
)
@click.option("--accuracy", is_flag=True, help="Measure accuracy, not speed.")
@click.option("-n", "--count", type=click.IntRange(min=1), help="Items of the data set to use. [accuracy: all]")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Threads inside an operator; 0: all cores.")
@click.option("--max-batchsize", type=click.IntRange(min=1), default=1, help="Items per run (Offline, MultiStream).")
@click.option("--time", "seconds", type=click.FloatRange(min=0), default=2.0, help="Minimum duration in seconds.")
@click.option("--qps", type=OneOf(click.FLOAT), help="Server: queries per second. [the highest within --max-latency]")
@click.option("--max-latency", type=OneOf(click.FLOAT), help="Server: limit of the 99th percentile, in seconds.")
@click.option("--outputs", help="Output to evaluate, if the model has several.")
@click.option("--output", "folder", type=click.Path(path_type=Path), help="Folder for results.json.")
@click.option("--cache", type=int, help="Accepted: nothing needs to be cached.", expose_value=False)
@click.option(
    *("--mlperf_conf", "--user_conf", "--inputs", "--data-format", "unused"),
    help="Accepted and ignored.",
    expose_value=False,
)
@click.option("--preprocess", help="Preprocessing: a name, a .toml file, or steps. [the data set's]")
@click.option("--class-offset", type=int, help="Number of scores before class 0.")
@click.option("--decoder", help=f"COCO: decoder of the head: {', '.join(DECODERS.names())}, or path.py:function.")
def command(**options: Any) -> None:
    """Measure the accuracy or speed of an image model with the options of MLPerf's main.py."""
    result = run(**options)
    say(line_of(result))


def run(
    *,
    model: Path | None,
    dataset_path: Path | None,
    dataset: str | None,
    dataset_list: str | None,
    profile: str,
    scenario: str,
    accuracy: bool,
    count: int | None,
    folder: Path | None,
    preprocess: str | None,
    class_offset: int | None,
    decoder: str | None,
    outputs: str | None,
    threads: int,
    seconds: float,
    max_batchsize: int,
    qps: float | None,
    max_latency: float | None,
    words: Sequence[str],
) -> dict[str, Any]:
    """Measure with these options and return the results in the form of results.json."""
    # The words of run_local.sh choose the model, but an explicit option still wins.
    named = _named(words)
    if named is not None:
        profile = f"{named}-{BACKEND}"
        model = model or _folder("MODEL_DIR", "--model") / FILES[named]
        dataset_path = dataset_path or _folder("DATA_DIR", "--dataset-path")
    if model is None or dataset_path is None:
        raise UsageError(
            "there is no model, or no data set", "Give --model and --dataset-path, or type `onnxruntime resnet50 cpu`"
        )
    name = dataset or PROFILES[profile]
    table = DATASETS[name]
    steps = preprocess or table.get("preprocess")
    # COCO's models differ in their preprocessing, so a guess would measure a wrong accuracy.
    if steps is None:
        raise UsageError(
            f"--dataset {name} has no preprocessing for its images",
            f"Add --preprocess (`edgeq preprocess list`), --decoder ({', '.join(DECODERS.names())}) and "
            "--dataset-list instances.json",
        )
    result: dict[str, Any] = {"model": str(model), "dataset": name, "scenario": scenario}
    if accuracy:
        options = {"class_offset": class_offset, "decoder": decoder, "output": outputs}
        # The user's options override those of the data set, and None means that an option was not given.
        task_options = {
            **table.get("options", {}),
            **{key: value for key, value in options.items() if value is not None},
        }
        labels: str | None = None
        if table["task"] == "classification":
            val_map = dataset_path / VAL_MAP
            # The file next to the images is used only if it exists: class folders are another way to give labels.
            labels = dataset_list or (str(val_map) if val_map.is_file() else None)
        # For detection, the list is COCO's instances file, not a list of labels.
        elif dataset_list is not None:
            task_options["annotations"] = Path(dataset_list)
        samples = open_samples(str(dataset_path), model_signature(model), preprocess=steps, labels=labels, model=model)
        request = EvalRequest(
            model,
            take_first(samples, count) if count is not None else samples,
            table["task"],
            TaskOptions(**task_options),
            settings=SessionSettings(intra_op_threads=threads),
        )
        evaluation = run_evaluation(request, progress=PrintedProgress())
        assert evaluation.accuracy is not None, "there is a task"
        result |= {"metrics": dict(evaluation.accuracy.metrics), "figures": {"total": evaluation.samples}}
    else:
        settings = BenchSettings(
            scenarios=(SCENARIOS[scenario],),
            min_duration_s=seconds,
            batch=max_batchsize,
            target_qps=qps,
            # MLPerf states latencies in seconds, edgeq in milliseconds.
            latency_bound_ms=1000 * max_latency if max_latency is not None else None,
            threads=threads,
        )
        result["figures"] = _speed(model, BenchData(str(dataset_path), steps, count), settings)
    if folder is not None:
        # Only earlier results may be replaced, never another file of that name.
        _check_results(folder / "results.json")
        with output_file(folder / "results.json", force=True) as draft:
            draft.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return result


def _named(words: Sequence[str]) -> str | None:
    """Return the model's name from the words that run_local.sh passes: backend, model and device, in any order. Return
    None if there are no words.
    """
    matches = [word for word in words if word in FILES]
    unknown = next((word for word in words if word not in (*FILES, BACKEND, DEVICE)), None)
    # A second model would be ignored silently otherwise.
    if unknown is not None or (words and len(matches) != 1):
        model = matches[0] if matches else next(iter(FILES))
        raise UsageError(
            f"unknown word {unknown!r}" if unknown is not None else "these words do not name exactly one model",
            f"Type {BACKEND} {model} {DEVICE}; models: {', '.join(FILES)}",
        )
    return matches[0] if matches else None


def _folder(variable: str, option: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        raise UsageError(f"${variable} is not set", f"Type `export {variable}=FOLDER`, or give {option}")
    return Path(value)


def _check_results(place: Path) -> None:
    """Refuse to replace anything but earlier results."""
    earlier = read_object(place)
    if place.exists() and (earlier is None or not {"model", "dataset", "scenario"} <= earlier.keys()):
        raise OutputError(
            f"{printable_path(place)} does not contain earlier results", "Move it, or choose another --output"
        )


def line_of(result: Mapping[str, Any]) -> str:
    """Return the last line of main.py's output."""
    figures = ", ".join(f"{k}={v:.4g}" for k, v in result["figures"].items())
    # Without accuracy, main.py's last line has this form.
    if "metrics" not in result:
        return f"TestScenario.{result['scenario']} {figures}"
    metrics = ", ".join(f"{name}={100 * value:.3f}%" for name, value in result["metrics"].items())
    return f"TestScenario.{result['scenario']} {metrics}, {figures}"


def _speed(model: Path, data: BenchData, settings: BenchSettings) -> dict[str, float]:
    """Measure a model in one scenario and return the measured values."""
    with device_errors():
        # Contradicting options fail here, before the model is opened.
        settings.check()
    measurement = bench(model, data=data, settings=settings, progress=PrintedProgress())
    latency = measurement.latency(list(measurement.models)[-1], settings.scenarios[0])
    return {key: value for key, value in latency.items() if isinstance(value, int | float)}


if __name__ == "__main__":
    run_program(command)
