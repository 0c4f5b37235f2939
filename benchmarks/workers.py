"""Check `--workers`: the speed of two processes against one, the bytes of the results, the effect of a killed worker,
and the memory.

    python benchmarks/workers.py [--rounds 3] [--only speed killed memory] [--json FILE]

- speed: run `edgeq calibrate` and `edgeq eval` for MobileNet on the 900 images of shared/data. Each worker has one
  thread. The time is that of the whole command, with and without the time to start a cluster, which is measured with a
  command on eight images. Two workers must be at least 1.5 times as fast as one and give the same bytes.
- killed: one worker gets SIGKILL during the run. The bytes must be the same.
- memory: the peak of the main process with 50,000 samples must be at most 1.1 times the peak with 5,000.

The benchmark needs two free cores and takes about six minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tasks import shared_data

FASTER, MORE = 1.5, 1.1
FEW, MANY = 5_000, 50_000
JOBS = ("calibrate", "eval")


@dataclass(frozen=True)
class Done:
    """Hold the seconds of a successful command, the peak bytes of its main process, and the digest of its result."""

    seconds: float
    peak: int
    digest: str


def run(job: str, words: list[str], workers: int, output: Path, *, kill_after: float | None = None) -> Done:
    """Run one command. With `kill_after`, kill one of its workers after this many seconds of work."""
    extra = ["-o", str(output), "--force"] if job == "calibrate" else ["--task", "classification"]
    command = [sys.executable, "-m", "edgeq", job, *words, *extra, "--json", "-q", "--workers", str(workers)]
    began = time.monotonic()
    # Turn off edgeq's process for limits, so that the watched process is the one that does the work.
    here = {**os.environ, "EDGEQ_BUDGET": "off"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*command, "--threads", "1"], env=here, **pipes) as process:
        peak, killed = 0, kill_after is None
        while process.poll() is None:
            peak = max(peak, peak_bytes(process.pid))
            if not killed and kill_after is not None:
                working = [pid for pid in workers_of(process.pid) if cpu_seconds(pid) > kill_after]
                if working:
                    os.kill(working[0], signal.SIGKILL)
                    killed = True
            time.sleep(0.02)
        seconds = time.monotonic() - began
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
    if process.returncode or not killed:
        raise SystemExit(f"{' '.join(command)}: {process.returncode}, killed: {killed}\n{err.decode()}")
    given = [(output / name).read_bytes() for name in ("statistics.json", "statistics.npz")] if "-o" in extra else [out]
    return Done(seconds, peak, hashlib.sha256(b"".join(given)).hexdigest())


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process in bytes, or 0 if the process has ended."""
    return next((int(line.split()[1]) * 1024 for line in status(pid) if line.startswith("VmHWM:")), 0)


def status(pid: int) -> list[str]:
    """Return the lines of /proc/PID/status, or an empty list if the process has ended."""
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return []


def workers_of(pid: int) -> list[int]:
    """Return the worker processes of `pid`. They are children of the server that multiprocessing started for it."""
    parents = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            parents[int(place.name)] = next((int(x[5:]) for x in status(int(place.name)) if x.startswith("PPid:")), 0)
    return [child for child, parent in parents.items() if parents.get(parent) == pid]


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process in seconds, or 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def small(folder: Path, count: int) -> list[str]:
    """Write a small classifier and `count` samples of 64 numbers, and return the arguments that name them."""
    random = np.random.default_rng(0)
    weights = {"w": random.normal(size=(64, 10)).astype(np.float32)}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])
    tensors = [numpy_helper.from_array(w, name) for name, w in weights.items()]
    graph = helper.make_graph(nodes, "small", [x], [y], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "s.onnx")
    data = folder / f"{count}.npz"
    labels = random.integers(0, 10, count)
    np.savez(data, x=random.normal(size=(count, 64)).astype(np.float32), label=labels)
    return [str(folder / "s.onnx"), "--data", str(data)]


def speed(folder: Path, rounds: int) -> dict[str, Any]:
    """Time each job with one and with two workers, print the ratios, and return the figures."""
    found: dict[str, Any] = {}
    for job in JOBS:
        words = real(job)
        times: dict[str, list[float]] = {"1": [], "2": [], "start 1": [], "start 2": []}
        digests = set()
        for _ in range(rounds):
            for workers in (1, 2):
                done = run(job, words, workers, folder / "cal")
                times[str(workers)].append(done.seconds)
                digests.add(done.digest)
                times[f"start {workers}"].append(run(job, [*words, "--count", "8"], workers, folder / "few").seconds)
        least = {key: statistics.median(values) for key, values in times.items()}
        whole = least["1"] / least["2"]
        work = (least["1"] - least["start 1"]) / (least["2"] - least["start 2"])
        print(
            f"{job}: {least['1']:.1f} s with one worker, {least['2']:.1f} s with two: {whole:.2f} times as fast "
            f"({work:.2f} without the start of {least['start 1']:.1f} and {least['start 2']:.1f} s); "
            f"bytes {'the same' if len(digests) == 1 else 'DIFFER'}",
            flush=True,
        )
        found[job] = {"seconds": times, "whole": whole, "work": work, "same": len(digests) == 1}
    return found


def killed(folder: Path) -> dict[str, Any]:
    """Run each job with and without killing a worker, print whether the bytes are the same, and return the figures."""
    found = {}
    for job in JOBS:
        whole = run(job, real(job), 2, folder / "whole")
        broken = run(job, real(job), 2, folder / "broken", kill_after=3.5)
        same = whole.digest == broken.digest
        print(
            f"{job} with a worker killed: {broken.seconds:.1f} s instead of {whole.seconds:.1f}; "
            f"bytes {'the same' if same else 'DIFFER'}",
            flush=True,
        )
        found[job] = {"seconds": [whole.seconds, broken.seconds], "same": same}
    return found


def memory(folder: Path) -> dict[str, Any]:
    """Print the peak memory of the main process with few and with many samples, and return the figures."""
    found = {}
    for job in JOBS:
        peaks = [run(job, small(folder, count), 2, folder / f"small-{count}").peak for count in (FEW, MANY)]
        print(
            f"{job}: main process {peaks[0] / 1e6:.0f} MB with {FEW:,} samples, {peaks[1] / 1e6:.0f} MB with {MANY:,}: "
            f"{peaks[1] / peaks[0]:.2f} times",
            flush=True,
        )
        found[job] = {"bytes": peaks, "ratio": peaks[1] / peaks[0]}
    return found


def real(job: str) -> list[str]:
    """Return the arguments of a job on MobileNet and the images of shared/data."""
    root = shared_data()
    if root is None:
        raise SystemExit("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
    labels = ["--labels", "name:{label}_*", "--class-offset", "1"] if job == "eval" else []
    model, data = root / "mobilenet_v1_0.25_224" / "model.onnx", root / "imagenet-sample" / "val"
    return [str(model), "--data", str(data), "--preprocess", "tf", *labels]


def main() -> None:
    """Run the chosen parts, and end with an error if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=("speed", "killed", "memory"), default=("speed", "killed", "memory")
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "speed" in arguments.only:
            found["speed"] = speed(folder, arguments.rounds)
        if "killed" in arguments.only:
            found["killed"] = killed(folder)
        if "memory" in arguments.only:
            found["memory"] = memory(folder)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    good = [job["whole"] >= FASTER and job["same"] for job in found.get("speed", {}).values()]
    good += [job["same"] for job in found.get("killed", {}).values()]
    good += [job["ratio"] <= MORE for job in found.get("memory", {}).values()]
    if not all(good):
        raise SystemExit("a bar is missed")


if __name__ == "__main__":
    main()
