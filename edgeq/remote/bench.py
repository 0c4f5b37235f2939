"""Run benchmarks on one board. The result includes the board's machine and its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgeq.measure.bench import Workload
from edgeq.measure.latency import Measurement, read_measurement
from edgeq.measure.loaded_model import LoadedModel
from edgeq.remote import link
from edgeq.remote.devices import Board
from edgeq.remote.machine import describe_board, record_board
from edgeq.remote.session import SENSELESS, BoardSession, open_board, senseless_answer_error, start_board_guest
from edgeq.run.session import SessionSettings, add_model_options, build_open_request
from edgeq.util.display import SILENT, Progress

# The ends of the keys of all durations, sizes and counts in a report.
_AMOUNTS = ("_ms", "_s", "_bytes", "count", "queries")
# Sums of amounts below this stay exact in float64. 1e15 ms are 31,000 years.
_LARGEST = 1e15


class BoardBench:
    """Run benchmarks on one board. See `edgeq.measure.bench.BenchPlace`."""

    def __init__(self, session: BoardSession, progress: Progress = SILENT) -> None:
        self._session = session
        self._progress = progress

    def models(self, models: Mapping[str, tuple[Path, SessionSettings]], work: Workload) -> Measurement:
        """Measure models on the board. See `BenchPlace.models`."""
        requests = [
            build_open_request(
                self._session.send_model(path, settings.engine, progress=self._progress),
                add_model_options(path, settings),
                name,
            )
            for name, (path, settings) in models.items()
        ]
        return self._run_bench({"models": requests, "bundle": ""}, work, models)

    def loaded(self, models: Mapping[str, LoadedModel], sessions: int, work: Workload) -> Measurement:
        """Measure loaded models side by side, each in `sessions` sessions. For a bundle, measure the variant that is
        open.
        """
        requests = [
            {**self._build_request(model), "name": name, "sessions": sessions} for name, model in models.items()
        ]
        return self._run_bench({"models": requests, "bundle": ""}, work, models)

    def _build_request(self, model: LoadedModel) -> dict[str, Any]:
        if model.variant is not None:
            return {"bundle": self._session.send_bundle(model.path), "variant": model.variant}
        place = self._session.send_model(model.path, model.settings.engine, progress=self._progress)
        return build_open_request(place, model.settings)

    def bundle(self, bundle: Path, variant: str | None, work: Workload) -> Measurement:
        """Send the bundle, unless the board already has it, and measure it. See `BenchPlace.bundle`."""
        place = self._session.send_bundle(bundle, self._progress)
        return self._run_bench({"bundle": place, "variant": variant}, work)

    def _run_bench(
        self, subject: Mapping[str, Any], work: Workload, models: Collection[str] | None = None
    ) -> Measurement:
        session, settings, options = self._session, work.settings, asdict(work.settings)
        del options["warm_up"]
        request = {"do": "bench", **subject, "settings": options, "shapes": dict(work.shapes or {}), "feeds": []}
        if work.samples is not None:
            request["feeds"] = session.send_samples(work.samples, self._progress)
        # The state is read directly before and after the run, because a throttled board explains slow figures.
        initial = describe_board(session)
        runs_s = len(settings.scenarios) * max(settings.min_duration_s, 1.0)
        # A board may be many times slower than this machine, so the limit is generous, but it ends a board that hangs.
        limit_s = link.BENCH_S + link.BENCH_FACTOR * runs_s
        stage = self._progress.stage(f"measuring on {session.board.name}")
        with start_board_guest(session, request_s=limit_s) as guest, stage:
            report = guest.exchange(request)[0]
        report["board"] = record_board(session, initial, describe_board(session))
        try:
            # The report comes from the board, which is not trusted, and its texts go to the user's terminal.
            check_amounts(report)
            measured = read_measurement(report)
            named = set(models if models is not None else measured.models)
            scenarios = measured.scenarios.values()
            if (
                not scenarios
                or {*measured.models} != named
                or any({*scenario["models"]} != named for scenario in scenarios)
            ):
                raise ValueError("figures of other models")
            if not {*measured.scenarios} <= {*settings.scenarios} or len(measured.text(verbose=True)) > link.TABLE:
                raise ValueError("scenarios that were not requested, or texts that are too long")
        except (*SENSELESS, ValueError) as error:
            raise senseless_answer_error(session) from error
        return measured


def check_amounts(value: Any, name: str = "") -> None:
    """Refuse a report with an amount that no measurement can give. Amounts are durations, sizes and counts, recognised
    by the end of their keys.

    Raises:
        ValueError: an amount is negative or far too large.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_amounts(item, key)
    elif isinstance(value, list):
        for item in value:
            check_amounts(item, name)
    elif isinstance(value, int | float) and name.endswith(_AMOUNTS) and not 0 <= value <= _LARGEST:
        raise ValueError(f"{name} is {value}")


def run_bench(board: Board, run: Callable[..., Measurement], *, progress: Progress = SILENT) -> Measurement:
    """Run a benchmark on a board.

    Args:
        run: `edgeq.measure.bench.bench`, with the models to measure already bound.

    Raises:
        BoardError: the board cannot be used.
        EdgeqError: any error that `run` raises.
    """
    with open_board(board) as session:
        return run(place=BoardBench(session, progress), progress=progress)
