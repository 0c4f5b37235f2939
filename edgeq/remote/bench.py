"""`edgeq bench --on`: the benchmark runs on the board; its report comes back with what the board is and was doing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeq_device.arrays import write_npz
from edgeq_device.scenarios import Feed

from edgeq.device import device_errors
from edgeq.measure.bench import Workload
from edgeq.measure.latency import Measurement, measurement
from edgeq.measure.loaded_model import LoadedModel
from edgeq.progress import SILENT, Progress
from edgeq.remote import bounds
from edgeq.remote.devices import Board
from edgeq.remote.guest import SENSELESS, senseless, start_board_guest
from edgeq.remote.machine import board_record, describe_board
from edgeq.remote.session import BoardSession, open_board
from edgeq.session import SessionSettings, with_carried
from edgeq.workers.guest import open_request

_AMOUNTS = ("_ms", "_s", "_bytes", "count", "queries")
_LARGEST = 1e15


class BoardBench:
    """Benchmarks on one board: see `edgeq.measure.bench.BenchPlace`."""

    def __init__(self, session: BoardSession, progress: Progress = SILENT) -> None:
        self._session = session
        self._progress = progress

    def models(self, models: Mapping[str, tuple[Path, SessionSettings]], work: Workload) -> Measurement:
        """See `BenchPlace.models`."""
        requests = [
            open_request(self._session.send_model(path, self._progress), with_carried(path, how), name)
            for name, (path, how) in models.items()
        ]
        return self._bench({"models": requests, "bundle": ""}, work, models)

    def loaded(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """Measure what is open there side by side, each in so many sessions; of a bundle the variant that is open."""
        requests = [{**self._request(one), "name": name, "sessions": sessions} for name, one in models.items()]
        return self._bench({"models": requests, "bundle": ""}, work, models)

    def _request(self, one: LoadedModel) -> dict[str, Any]:
        if one.variant is not None:
            return {"bundle": self._session.send_bundle(one.path), "variant": one.variant}
        return open_request(self._session.send_model(one.path, self._progress), one.settings)

    def bundle(self, bundle: Path, variant: str | None, work: Workload) -> Measurement:
        """See `BenchPlace.bundle`; the bundle is sent, unless it lies there already."""
        place = self._session.send_bundle(bundle, self._progress)
        return self._bench({"bundle": place, "variant": variant}, work)

    def _bench(self, what: Mapping[str, Any], work: Workload, models: Collection[str] | None = None) -> Measurement:
        session, settings, plain = self._session, work.settings, asdict(work.settings)
        del plain["warm_up"]
        request = {"do": "bench", **what, "settings": plain, "shapes": dict(work.shapes or {}), "feeds": []}
        if work.samples is not None:
            request["feeds"] = self._send_samples(work.samples)
        before = describe_board(session)
        runs_s = len(settings.scenarios) * max(settings.min_duration_s, 1.0)
        limit_s = bounds.BENCH_S + bounds.BENCH_FACTOR * runs_s
        stage = self._progress.stage(f"measuring on {session.board.name}")
        with start_board_guest(session, request_s=limit_s) as guest, stage:
            report = guest.exchange(request)[0]
        report["board"] = board_record(session, before, describe_board(session))
        try:
            check_amounts(report)
            found = measurement(report)
            named = set(models if models is not None else found.models)
            scenarios = found.scenarios.values()
            if not scenarios or {*found.models} != named or any({*one["models"]} != named for one in scenarios):
                raise ValueError("figures of other models")
            if not {*found.scenarios} <= {*settings.scenarios} or len(found.text(verbose=True)) > bounds.TABLE:
                raise ValueError("scenarios or texts that nobody asked for")
        except (*SENSELESS, ValueError) as error:
            raise senseless(session) from error
        return found

    def _send_samples(self, samples: Sequence[Feed]) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="edgeq-samples-") as folder, device_errors():
            files = {f"{index}.npz": Path(folder) / f"{index}.npz" for index in range(len(samples))}
            for file, sample in zip(files.values(), samples, strict=True):
                write_npz(file, sample)
            place = self._session.send(files, keep=False, progress=self._progress)
        return [f"{place}/{name}" for name in files]


def check_amounts(value: Any, name: str = "") -> None:
    """Refuse a duration, size or count in a report, by the end of its name, that no measurement gives.

    Raises:
        ValueError: it is negative, or far too large.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_amounts(item, key)
    elif isinstance(value, list):
        for item in value:
            check_amounts(item, name)
    elif isinstance(value, int | float) and name.endswith(_AMOUNTS) and not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is {value}")


def bench_on(board: Board, run: Callable[..., Measurement], *, progress: Progress = SILENT) -> Measurement:
    """Run a benchmark on a board.

    Args:
        run: `edgeq.measure.bench.bench`, of what is to be measured.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: as `run`.
    """
    with open_board(board) as session:
        return run(place=BoardBench(session, progress), progress=progress)
