"""Estimate the time for a million samples on many workers and for `edgeq bench` on a thousand boards. To do so, measure
coefficients, then simulate.

    python benchmarks/scale.py --measure          # coefficients, on this machine, two workers; about a minute
    python benchmarks/scale.py                    # the simulation, with the coefficients of docs/scale.md
    python benchmarks/scale.py --coefficients FILE.json

The simulation models `edgeq.distributed.Workers.map` with the shard sizes that it uses. A worker takes the next shard
when it becomes free. Results wait until they can be merged in order, but at most four results wait for each thread. The
main process merges one result at a time. The simulation does not model the internals of Dask. Their cost for each shard
is a measured coefficient.
"""

from __future__ import annotations

import argparse
import heapq
import json
import pickle
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tasks import shared_data

from edgeq.calibration.collect import CalibrationJob, ShardMerger
from edgeq.calibration.plan import plan_statistics, quantizable_tensors
from edgeq.calibration.statistics import TensorStatistics
from edgeq.data.samples import Shard, Sharded, SourceSamples, open_samples
from edgeq.distributed.workers import _WAITING, Files, open_workers, share_files
from edgeq.measure.shared_evaluation import EvaluationJob, ModelAt
from edgeq.measure.task import make_task
from edgeq.model.prepare import prepare_model
from edgeq.run.session import SessionSettings

SAMPLES = 1_000_000


@dataclass(frozen=True)
class Job:
    """Describe the cost of one kind of work.

    Attributes:
        sample_s: seconds that a worker needs per sample to read, preprocess, run and count it.
        result_bytes: size in bytes of the result of a shard of 512 samples.
        merge_s: seconds that the main process needs to merge a shard.
    """

    sample_s: float
    result_bytes: float
    merge_s: float


@dataclass(frozen=True)
class Coefficients:
    """Hold coefficients that were measured on the machine that docs/scale.md names. Times are processor seconds."""

    calibrate: Job = Job(0.0115, 3.7e6, 0.0076)
    evaluate: Job = Job(0.0069, 1.2e3, 0.0)
    sample_bytes: float = 22.6e3
    """Size of an image file in bytes. As a streamed sample, the image has 602 kB."""
    digest_s: float = 0.000058
    """Seconds that the main process needs per sample to compute the digest, if samples are sent by reference."""
    shard_s: float = 0.0111
    """Seconds that the main process (client and scheduler) needs per shard to send, assign, fetch and forget it."""
    reference_bytes: float = 51.0
    """Bytes per sample in the list of files, which is sent to each worker once."""
    restart_s: float = 3.0
    """Seconds until a killed worker has restarted and opened its models."""


class Nothing:
    """Define a job that does nothing, so that only the cost of Dask is left."""

    def open(self, stack: ExitStack) -> Callable[[int], int]:
        """See `edgeq.distributed.workers.WorkerJob`."""
        return abs


def cost(run: Callable[[Shard], Any], merge: Callable[[Any], None]) -> Job:
    """Return the cost of a job, measured on two shards of 100 samples. `merge` adds a result to the earlier results."""
    run(Shard(0, 8))
    began = time.process_time()
    first, second = (run(Shard(start, start + 100)) for start in (0, 100))
    spent = (time.process_time() - began) / 200
    merge(first)
    began = time.process_time()
    merge(second)
    return Job(spent, len(pickle.dumps(first)), time.process_time() - began)


def measure() -> Coefficients:
    """Measure the coefficients on this machine."""
    root = shared_data()
    if root is None:
        raise SystemExit("shared/data is not next to this checkout (or set EDGEQ_SHARED_DATA)")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        prepared = prepare_model(root / "mobilenet_v1_0.25_224" / "model.onnx", Path(folder))
        samples = open_samples(
            root / "imagenet-sample" / "val", prepared.signature, preprocess="tf", labels="name:{label}_*", count=200
        )
        assert isinstance(samples, SourceSamples)
        files = Files(prepared.path, (prepared.path.name,), "")
        names = quantizable_tensors(prepared.model)
        calibrate = CalibrationJob(files, samples, names, {}, 1, False).open(stack)
        model = {"m": (files, ModelAt(prepared.path, SessionSettings()))}
        task = make_task("classification", None)
        evaluate = EvaluationJob(model, samples, replace(task, class_offset=1), None).open(stack)  # type: ignore[type-var]
        merged = ShardMerger(plan_statistics(prepared.model, names, {}), dict.fromkeys(names, TensorStatistics()))
        # the results of an accuracy job take no time to merge
        jobs = [cost(calibrate, merged.add), cost(evaluate, [].append)]
        began = time.process_time()
        samples.digest()
        digest_s = (time.process_time() - began) / len(samples)
        pool = stack.enter_context(open_workers(2))
        assert pool is not None
        list(pool.map(Nothing(), range(50)))
        rounds = []
        for _ in range(5):
            began = time.process_time()
            list(pool.map(Nothing(), range(200)))
            rounds.append((time.process_time() - began) / 200)
        reference = Sharded(samples, pool).reference
        assert reference is not None
        share_files(pool, prepared.path)
        whole = sum(path.stat().st_size for path in (root / "imagenet-sample" / "val").iterdir())
        listed = len(pickle.dumps(samples.opened_source.records)) / len(samples.opened_source.records)
    return Coefficients(
        jobs[0], jobs[1], whole / 900, digest_s, statistics.median(rounds), listed, Coefficients.restart_s
    )


@dataclass(frozen=True)
class Played:
    """Hold the result of a simulated run.

    Attributes:
        seconds: length of the run.
        main: share of the time in which the main process was busy.
        workers: share of the time in which the workers were busy.
        received: bytes received.
        waiting: largest total size in bytes of the results that were waiting at one time.
        twice: number of samples that were run twice.
    """

    seconds: float
    main: float
    workers: float
    received: float
    waiting: float
    twice: int


def play(
    job: Job, known: Coefficients, workers: int, *, samples: int = SAMPLES, deaths: tuple[float, ...] = ()
) -> Played:
    """Simulate `samples` on `workers`. One worker dies at each of the times `deaths`, in seconds."""
    size = min(512, max(8, -(-samples // 16)))
    remaining = deque((start, min(size, samples - start)) for start in range(0, samples, size))
    order = deque(start for start, _ in remaining)
    running: list[tuple[float, int, int]] = []  # (end of the shard, start of the shard, number of samples)
    dying = deque(sorted(deaths))
    done: set[int] = set()
    begun: set[int] = set()
    spent = waiting = 0.0
    free, twice = workers, 0
    main_until = samples * known.digest_s  # the main process computes the digest before it sends anything
    total = main_until
    now = main_until
    while order:
        while remaining and free and len(begun) < _WAITING * workers:
            start, count = remaining.popleft()
            main_until = max(main_until, now) + known.shard_s
            total += known.shard_s
            heapq.heappush(running, (main_until + count * job.sample_s, start, count))
            spent += count * job.sample_s
            begun.add(start)
            free -= 1
        while order and order[0] in done:
            start = order.popleft()
            done.discard(start)
            begun.discard(start)
            main_until = max(main_until, now) + job.merge_s
            total += job.merge_s
        if not order:
            break
        if not running:
            continue
        if dying and dying[0] < running[0][0]:
            now = max(now, dying.popleft())
            end, start, count = running.pop()
            heapq.heapify(running)
            spent -= max(0.0, end - now)
            twice += count
            heapq.heappush(running, (now + known.restart_s + count * job.sample_s, start, count))
            spent += count * job.sample_s
            continue
        now, start, _ = heapq.heappop(running)
        free += 1
        done.add(start)
        waiting = max(waiting, len(done) * job.result_bytes)
    seconds = max(now, main_until)
    shards = -(-samples // size)
    return Played(seconds, total / seconds, spent / (seconds * workers), shards * job.result_bytes, waiting, twice)


def clock(seconds: float) -> str:
    """Return a number of seconds as text in seconds, minutes or hours."""
    return (
        f"{seconds:.0f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
        if seconds < 36000
        else f"{seconds / 3600:.1f} h"
    )


def size(value: float) -> str:
    """Return a number of bytes as text with a decimal prefix."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def workers_table(known: Coefficients) -> None:
    """Print a table of the simulated runs for each job and number of workers."""
    print(f"{SAMPLES:,} samples by reference ({size(SAMPLES * known.sample_bytes)} of files, read once by a worker)\n")
    print("| job | workers | time | main process busy | workers busy | results received | waiting at most | one dies |")
    print("|---|---|---|---|---|---|---|---|")
    for name in ("calibrate", "evaluate"):
        job = getattr(known, name)
        for workers in (1, 8, 64, 256, 1024):
            whole = play(job, known, workers)
            died = play(job, known, workers, deaths=(whole.seconds / 2,))
            print(
                f"| {name} | {workers} | {clock(whole.seconds)} | {whole.main:.0%} | {whole.workers:.0%} | "
                f"{size(whole.received)} | {size(whole.waiting)} | +{died.seconds - whole.seconds:.1f} s, "
                f"{died.twice} samples twice |"
            )
    listed = known.reference_bytes * SAMPLES
    print(f"\nlist of files: {size(listed)} to each worker, {size(1024 * listed)} to 1024 of them")
    print(f"streamed instead: {size(SAMPLES * 602112)} through the scheduler")


def boards_table() -> None:
    """Print an estimate for `edgeq bench --on fleet`. Each board gets a bundle of 5 MB once, measures for 20 s, and
    returns a report of 20 kB.
    """
    print("\n| boards | at once | uplink | bundles sent | time | the same again, nothing sent |")
    print("|---|---|---|---|---|---|")
    for boards in (10, 100, 1000):
        for uplink in (12.5e6, 125e6):
            at_once, setup_s, measured_s = 64, 2.0, 20.0
            sent = boards * 5e6
            rounds = -(-boards // at_once)
            again = rounds * (setup_s + measured_s)
            print(
                f"| {boards} | {at_once} | {size(uplink)}/s | {size(sent)} | {clock(max(sent / uplink, again))} | "
                f"{clock(again)} |"
            )


def main() -> None:
    """Measure the coefficients, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--coefficients", type=Path)
    arguments = parser.parse_args()
    known = Coefficients()
    if arguments.measure:
        known = measure()
        print(json.dumps(asdict(known), indent=1))
    elif arguments.coefficients is not None:
        given = json.loads(arguments.coefficients.read_text())
        fields: dict[str, Any] = {k: Job(**v) if isinstance(v, dict) else v for k, v in given.items()}
        known = Coefficients(**fields)
    workers_table(known)
    boards_table()


if __name__ == "__main__":
    main()
