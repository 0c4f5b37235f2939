"""What racing engines gains: `edgeq tune` with every engine that is installed, beside `--engine onnxruntime`.

    python benchmarks/engines.py [--only NAME ...] [--by-hand] [--json FILE]

Each engine runs in a process of its own; bars are ratios of one race. `--by-hand` also races the winner against the
openvino package used directly, with the better of the float and the int8 file. Needs onnxruntime-ep-openvino.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders import edgeq_json
from edgeq_device.claim import rank_until_settled, ratio
from edgeq_device.latency import WarmUp
from edgeq_device.package import open_bundle
from edgeq_device.scenarios import query_runner
from models import IMAGE, mobilenetv2_shaped, resnet50_shaped
from tasks import shared_data
from tune_cases import cases
from tuned import timed, tune, verdict, winner

from edgeq.hardware.detect import detect_machine
from edgeq.run.engines import EngineChoice, load_engines
from edgeq.run.session import SessionSettings, start_engine

SHAPES = {"ResNet-50-shaped": resnet50_shaped, "MobileNetV2-shaped": mobilenetv2_shaped}
AGAINST_FLOAT = {"yolox_nano": 1.3, "mobilenet, first half": 1.3, "mobilenet, second half": 1.3}
ACCURACY = {"yolox_nano": ("mAP50-95", 0.331)}
LONGEST_S = {"yolox_nano": 300.0}
TIMES_AS_LONG, SLOWER, BY_HAND = 1.6, 1.03, 1.05
FASTER = {"ResNet-50-shaped": {"amx_int8": (1.25, 1.6), "avx512_vnni": (1.1, 1 / SLOWER)}}
"""By the first feature that the CPU has: with the best threads of each, and on one thread."""


Records = Mapping[str, Mapping[str, Any]]


class ByHand:
    """The openvino package, used directly, as a session."""

    def __init__(self, model: Path, threads: int) -> None:
        import openvino

        options = {"PERFORMANCE_HINT": "LATENCY", **({"INFERENCE_NUM_THREADS": threads} if threads else {})}
        self._request = openvino.Core().compile_model(str(model), "CPU", options).create_infer_request()

    def run(self, names: None, feed: Mapping[str, Any]) -> Any:
        return self._request.infer(dict(feed))


def p50s(
    model: Path, folder: Path, records: Records, feed: Mapping[str, Any], threads: int | None, by_hand: bool
) -> dict[str, float]:
    """How many times the speed of the restricted build each has, in one race.

    Args:
        threads: for all; None takes what tuning chose.
    """
    with ExitStack() as stack:
        runners = {}
        for name, record in {**records, "float32": {"ended": ""}}.items():
            chosen = winner(record)
            choice = EngineChoice(load_engines()[chosen["engine"]], chosen["precision"])
            file, options = model, {}
            if "ended" not in record:
                bundle = stack.enter_context(open_bundle(folder / name))
                variants = {v.ep: v for v in bundle.components["model"]}
                variant = variants[choice.engine.provider]
                assert variant.model is not None
                file, options = variant.model, dict(variant.session_options)
            count = chosen["threads"] if threads is None else threads
            settings = SessionSettings(
                config=options, intra_op_threads=count, engine=choice.engine, precision=choice.precision
            )
            guest = stack.enter_context(start_engine(choice.engine))
            runners[name] = query_runner(guest.open(file, settings), [feed])
            if by_hand and name == "all":
                for kind, path in {"float": model, "int8": file}.items():
                    runners[f"by hand, {kind}"] = query_runner(ByHand(path, count), [feed])
        found = rank_until_settled(runners, max_duration_s=40, tie=0.01, warmup=WarmUp(max_s=2)).distributions
    return {name: float(ratio(found["onnxruntime"], d).estimate) for name, d in found.items()}


def judge(name: str, model: Path, folder: Path, feed: Mapping[str, Any], records: Records, by_hand: bool) -> Any:
    for which, record in records.items():
        print(f"    {which}: {record['verdict'][0]}; {record['took_s']:.0f} s", flush=True)
    best, single = (p50s(model, folder, records, feed, n, by_hand) for n in (None, 1))
    features = detect_machine().features
    never = (1 / SLOWER, 1 / SLOWER)
    least = next((bars for feature, bars in FASTER.get(name, {}).items() if feature in features), never)
    for title, speeds, bar in (("threads of each", best, least[0]), ("one thread", single, least[1])):
        verdict(f"{speeds['all']:.2f} times the restricted build's speed, {title}", speeds["all"] >= bar, f"{bar:.2f}")
        hands = max((v for k, v in speeds.items() if k.startswith("by hand")), default=0.0)
        if hands:
            verdict(
                f"{hands / speeds['all']:.2f} times the latency by hand", hands <= BY_HAND * speeds["all"], f"{BY_HAND}"
            )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="models, by their names")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument("--samples", type=int, default=32, help="of the shapes")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    options = parser.parse_args()
    raced = {"all": (), "onnxruntime": ("--engine", "onnxruntime")}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        images = np.random.default_rng(0).normal(size=(options.samples, 3, IMAGE, IMAGE)).astype(np.float32)
        np.save(place / "images.npy", images)
        for name, make in SHAPES.items():
            if not options.only or name in options.only:
                print(name, flush=True)
                model, own = make(place / f"{name}.onnx"), place / name
                own.mkdir()
                tune_command = ("tune", str(model), "--data", str(place / "images.npy"), "--no-memory", "-q")
                records = {
                    which: timed(partial(edgeq_json, *tune_command, "-o", str(own / which), *extra))
                    for which, extra in raced.items()
                }
                results[name] = judge(name, model, own, {"input": images[:1]}, records, options.by_hand)
        root = shared_data()
        if root is None:
            print("the other models are skipped: shared/data is not beside this checkout (or set EDGEQ_SHARED_DATA)")
        for case in cases(root, place / "halves") if root is not None else ():
            if not options.only or case.name in options.only:
                print(case.name, flush=True)
                own = place / case.name
                own.mkdir()
                records = {which: timed(partial(tune, case, own / which, extra)) for which, extra in raced.items()}
                feed = dict(next(iter(case.open(case.data, 1))).inputs)
                results[case.name] = judge(case.name, case.model, own, feed, records, options.by_hand)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    unknown = set(options.only) - results.keys()
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))} here")


if __name__ == "__main__":
    main()
