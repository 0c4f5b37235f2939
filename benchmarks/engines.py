"""Measure the gain from several engines. The benchmark compares `edgeq tune`, which uses every installed engine, with
`edgeq tune --engine onnxruntime`.

    python benchmarks/engines.py [--only NAME ...] [--by-hand] [--keep DIR] [--minilm MODEL.onnx] [--json FILE]

Each engine runs in its own process. The limits are ratios between models that were timed against each other.
`--by-hand` instead times the winner against everything that a user could build by hand: float32, edgeq's int8 and
NNCF's int8, in onnxruntime and in the openvino package itself, in f32 and bf16, on one thread and on all. `--keep`
stores the builds and reuses stored ones. The benchmark needs onnxruntime-ep-openvino or openvino, and also nncf for
--by-hand. make_model.py makes minilm's model.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders import edgeq_json
from edgeq_device.bundle.package import open_bundle
from hands import accuracies, race, runtime, times, ways
from models import IMAGE, mobilenetv2_shaped, resnet50_shaped
from tasks import shared_data
from tune_cases import SPECS, Case, cases
from tuned import timed, tune, verdict, winner

from edgeq.hardware.detect import detect_machine
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.run.session import SessionSettings, start_engine

SHAPES = {"ResNet-50-shaped": resnet50_shaped, "MobileNetV2-shaped": mobilenetv2_shaped}
AGAINST_FLOAT = {"yolox_nano": 1.3, "mobilenet, first half": 1.3, "mobilenet, second half": 1.3}
ACCURACY = {"yolox_nano": ("mAP50-95", 0.331)}
LONGEST_S = {"yolox_nano": 300.0}
TIMES_AS_LONG, SLOWER, BY_HAND = 1.6, 1.03, 1.05
LOST_MORE = 0.005
"""A hand-made build counts only if it loses at most this much more accuracy than the winner."""
TOKENS = 32
FASTER = {"ResNet-50-shaped": {"amx_int8": (1.25, 1.6), "avx512_vnni": (1.1, 1 / SLOWER)}}
"""Model → CPU feature → minimum speed-up with the best number of threads for each build, and minimum speed-up on one
thread. The first feature that the CPU has applies.
"""


Records = Mapping[str, Mapping[str, Any]]


def open_tuned(stack: ExitStack, bundle: Path, record: Mapping[str, Any], model: Path, threads: int | None) -> Any:
    """Open the candidate that tuning chose, in its own process. If tuning ended without a bundle, open float32 in
    onnxruntime.

    Args:
        threads: number of threads, or None for the number that tuning chose.
    """
    chosen = winner(record)
    choice = EngineChoice(load_engines()[chosen["engine"]], chosen["precision"])
    file, config = model, {}
    if "ended" not in record:
        variants = {v.ep: v for v in stack.enter_context(open_bundle(bundle)).components["model"]}
        variant = variants[choice.engine.provider]
        assert variant.model is not None
        file, config = variant.model, dict(variant.session_options)
    count = chosen["threads"] if threads is None else threads
    settings = SessionSettings(config=config, intra_op_threads=count, engine=choice.engine, precision=choice.precision)
    return stack.enter_context(start_engine(choice.engine)).open(file, settings)


def p50s(model: Path, folder: Path, records: Records, feed: Mapping[str, Any], threads: int | None) -> dict[str, float]:
    """Return the speed of each build as a ratio to the speed of the restricted build. All builds are timed against each
    other.
    """
    with ExitStack() as stack:
        everything = {**records, "float32": {"ended": ""}}.items()
        sessions = {name: open_tuned(stack, folder / name, record, model, threads) for name, record in everything}
        found = race(sessions, feed)
    return {name: times(found["onnxruntime"], d) for name, d in found.items()}


def judge_by_hand(case: Case, folder: Path, feed: Mapping[str, Any], run: Callable[[], dict[str, Any]]) -> Any:
    """Time the winner of tuning against all hand-made builds that lose at most half a point more than the winner."""
    kept = folder / "record.json"
    if not kept.exists():
        kept.write_text(json.dumps(timed(run)), "utf-8")
    record = json.loads(kept.read_text("utf-8"))
    print(f"    {record['verdict'][0]}; {record['took_s']:.0f} s", flush=True)
    tried = {str(way): way for way in ways(case, folder)}
    values = folder / "accuracy.json"
    known: dict[str, float] = json.loads(values.read_text("utf-8")) if values.exists() else {}
    if case.options and not {"tuned", *tried} <= known.keys():
        with ExitStack() as stack:
            own = stack.enter_context(runtime())
            opened = {name: way.open(own, 0) for name, way in tried.items()}
            tuned = open_tuned(stack, folder / "all", record, case.model, None)
            known = accuracies(case, {"tuned": tuned, **opened})
            values.write_text(json.dumps(known), "utf-8")
    with ExitStack() as stack:
        own = stack.enter_context(runtime())
        sessions = {"tuned": open_tuned(stack, folder / "all", record, case.model, None)}
        for count in (1, 0):
            for name, way in tried.items():
                sessions[f"{name}, {count or 'all'} threads"] = way.open(own, count, feed)
        found = race(sessions, feed)
    lost = {name: known["tuned"] - known[name] if known else 0.0 for name in tried}
    slower = {name: times(d, found["tuned"]) for name, d in found.items()}
    for name, speed in sorted(slower.items(), key=lambda item: item[1]):
        value = f", {100 * known[name.rsplit(',', 1)[0]]:.2f}" if known else ""
        print(f"    {found[name].p50:8.3f} ms, {speed:.2f} times the latency: {name}{value}")
    right = {name: slower[name] for name in slower if name != "tuned" and lost[name.rsplit(",", 1)[0]] <= LOST_MORE}
    best = min(right, key=lambda name: right[name])
    verdict(f"{1 / right[best]:.2f} times the latency of {best}", 1 / right[best] <= BY_HAND, f"{BY_HAND}")
    own32 = min(slower[f"float32 in onnxruntime:f32, {count} threads"] for count in (1, "all"))
    print(f"    {own32:.2f} times the speed of float32 in onnxruntime")
    return {"times": slower, "accuracy": known, "p50_ms": {name: d.p50 for name, d in found.items()}, "tune": record}


def judge(name: str, model: Path, folder: Path, feed: Mapping[str, Any], records: Records) -> Any:
    """Check the tuned builds against a case's limits on speed, tuning time and accuracy. Return the figures."""
    for which, record in records.items():
        print(f"    {which}: {record['verdict'][0]}; {record['took_s']:.0f} s", flush=True)
    best, single = (p50s(model, folder, records, feed, n) for n in (None, 1))
    features = detect_machine().features
    never = (1 / SLOWER, 1 / SLOWER)
    least = next((bars for feature, bars in FASTER.get(name, {}).items() if feature in features), never)
    for title, speeds, bar in (("threads of each", best, least[0]), ("one thread", single, least[1])):
        verdict(f"{speeds['all']:.2f} times the restricted build's speed, {title}", speeds["all"] >= bar, f"{bar:.2f}")
    longer = records["all"]["took_s"] / records["onnxruntime"]["took_s"]
    verdict(f"{longer:.2f} times the time of one engine", longer <= TIMES_AS_LONG, f"{TIMES_AS_LONG}")
    if name in AGAINST_FLOAT:
        speed = best["all"] / best["float32"]
        verdict(f"{speed:.2f} times float32's speed", speed >= AGAINST_FLOAT[name], f"{AGAINST_FLOAT[name]}")
    if name in LONGEST_S:
        took = records["all"]["took_s"]
        verdict(f"{took:.0f} s", took <= LONGEST_S[name], f"{LONGEST_S[name]:.0f} s")
    if name in ACCURACY:
        metric, bar = ACCURACY[name]
        found = winner(records["all"])
        value = found["accuracy"]["metrics"][metric] if "accuracy" in found else 0.0
        verdict(f"{metric} {value:.4f}", value >= bar, f"{bar}")
    return {"best": best, "one thread": single, "tune": dict(records)}


def subjects(place: Path, samples: int, minilm: Path | None) -> Iterator[Case]:
    """Yield models with the shapes of well-known networks and, if shared/data exists, its models."""
    images = np.random.default_rng(0).normal(size=(samples, 3, IMAGE, IMAGE)).astype(np.float32)
    np.save(place / "images.npy", images)
    for name, make in SHAPES.items():
        file = place / f"{name}.onnx"
        data = place / "images.npy"
        yield Case(name, file if file.exists() else make(file), data, data, data, None, (), "1%", 0.01)
    root = shared_data()
    if root is None:
        print("the other models are skipped: shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
        return
    yield from cases(root, place / "halves")
    if minilm is not None:
        home = root / "minilm_l6" / "data"
        os.environ.setdefault("EDGEQ_TOKENIZER", str(home / "tokenizer.json"))
        seen, judged = home / "calib-stsb-en-dev-200.csv", home / "stsb-en-test.csv"
        spec, options = Path(f"{SPECS / 'minilm_l6.py'}:tokens"), ("--task", "similarity")
        yield Case("minilm", minilm, seen, judged, judged, spec, options, "0.5pt", 0.005)


def first_feed(case: Case) -> dict[str, Any]:
    """Return the inputs of the first sample. For tokens, this is one row of typical length."""
    feed = dict(next(iter(case.open(case.judged_on, 1))).inputs)
    if "attention_mask" not in feed:
        return feed
    return {name: np.resize(value, (1, TOKENS)) for name, value in feed.items()}


def tune_command(case: Case, output: Path, extra: tuple[str, ...]) -> dict[str, Any]:
    """Run `edgeq tune` on a case, with labels if it has a task, and return the record."""
    if case.options:
        return tune(case, output, extra)
    return edgeq_json("tune", str(case.model), "--data", str(case.data), "--no-memory", "-q", "-o", str(output), *extra)


def main() -> None:
    """Run all chosen models, then print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="models, by their names")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder that keeps the builds for another run")
    parser.add_argument("--minilm", type=Path, help="the model that minilm_l6/make_model.py made")
    parser.add_argument("--samples", type=int, default=32, help="number of samples for the shapes")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    raced = {"all": (), "onnxruntime": ("--engine", "onnxruntime")}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = options.keep or Path(folder)
        place.mkdir(exist_ok=True)
        for case in subjects(place, options.samples, options.minilm):
            if options.only and case.name not in options.only:
                continue
            print(case.name, flush=True)
            own = place / case.name
            own.mkdir(exist_ok=True)
            feed = first_feed(case)
            runs = {which: partial(tune_command, case, own / which, extra) for which, extra in raced.items()}
            if options.by_hand:
                results[case.name] = judge_by_hand(case, own, feed, runs["all"])
            else:
                records = {which: timed(run) for which, run in runs.items()}
                results[case.name] = judge(case.name, case.model, own, feed, records)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    unknown = set(options.only) - results.keys()
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))} here")


if __name__ == "__main__":
    main()
