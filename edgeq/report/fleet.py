"""A benchmark on many boards: a row for each, and what boards of one kind have in common. Keys: docs/boards.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from edgeq_device.claim import Claim

from edgeq.report.numbers import milliseconds, share
from edgeq.report.timing import FLOAT, LatencyFigures
from edgeq.util.records import Amount, Count, Positive

SCHEMA = "edgeq.fleet/1"
_MOST = 1000
Table = tuple[Sequence[str], list[Sequence[str]]]


@dataclass(frozen=True)
class FleetRow:
    """One board.

    Attributes:
        reason: why nothing was measured; "" where it was.
        latency: by model; ratios to float32 by model, where it was measured beside it.
        notes: what may have disturbed the figures.
    """

    name: str
    kind: str
    reason: str = ""
    cpu: str = ""
    latency: Mapping[str, LatencyFigures] = field(default_factory=dict)
    ratios: Mapping[str, Claim] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class KindRow:
    """One model on the boards of one kind.

    Attributes:
        boards: that it was measured on.
        p50_ms, p90_ms, p99_ms: medians over the boards.
        spread: between the slowest and the fastest board's p50, as a share of the median; None for one board.
        best: whether no other model is faster on boards of this kind.
    """

    kind: str
    model: str
    boards: Count
    p50_ms: Positive
    p90_ms: Positive
    p99_ms: Positive
    spread: Amount | None = None
    best: bool = False


@dataclass(frozen=True)
class FleetRecord:
    """`edgeq bench --on FLEET.toml --json`: one scenario on every board."""

    boards: tuple[FleetRow, ...]
    kinds: tuple[KindRow, ...] = ()
    scenario: str = ""
    schema: str = SCHEMA


def summarised(boards: Sequence[FleetRow], scenario: str) -> FleetRecord:
    """The boards' rows, and those of their kinds."""
    kinds = dict.fromkeys(row.kind for row in boards)
    return FleetRecord(
        tuple(boards),
        tuple(row for kind in kinds for row in _kind(kind, [b for b in boards if b.kind == kind])),
        scenario,
    )


def _kind(kind: str, boards: Sequence[FleetRow]) -> Iterator[KindRow]:
    models = dict.fromkeys(model for board in boards for model in board.latency)
    rows = []
    for model in models:
        found = [board.latency[model] for board in boards if model in board.latency]
        p50 = [figures.p50_ms for figures in found]
        middle = statistics.median(p50)
        rows.append(
            KindRow(
                kind,
                model,
                len(found),
                middle,
                statistics.median(f.p90_ms or f.p50_ms for f in found),
                statistics.median(f.p99_ms or f.p50_ms for f in found),
                (max(p50) - min(p50)) / middle if len(p50) > 1 else None,
            )
        )
    fastest = min((row.p50_ms for row in rows), default=0.0)
    yield from (replace(row, best=row.p50_ms == fastest) for row in rows)


def board_table(record: FleetRecord) -> Table:
    """Heads and a row for each model on each board; `failures` says why a board has no figures."""
    heads = ("board", "kind", "model", "p50", "p90", "p99", "times float32")
    rows: list[Sequence[str]] = []
    for board in record.boards[:_MOST]:
        if board.reason:
            rows.append((board.name, board.kind, "failed", "", "", "", ""))
        for model, figures in board.latency.items():
            claim = board.ratios.get(model)
            times = claim.figures() if claim is not None and model != FLOAT else ""
            rows.append((board.name, board.kind, model, *_latencies(figures), times))
    return heads, rows


def failures(record: FleetRecord) -> list[str]:
    """Why boards have no figures, a line each."""
    return [f"{board.name}: {board.reason}" for board in record.boards[:_MOST] if board.reason]


def kind_table(record: FleetRecord) -> Table:
    """Heads and a row for each model on each kind of board."""
    heads = ("kind", "model", "boards", "p50", "p90", "p99", "spread of p50", "")
    return heads, [
        (
            *(row.kind, row.model, str(row.boards), *_latencies(row)),
            share(row.spread) if row.spread is not None else "",
            "best" if row.best else "",
        )
        for row in record.kinds[:_MOST]
    ]


def _latencies(figures: LatencyFigures | KindRow) -> tuple[str, ...]:
    values = (figures.p50_ms, figures.p90_ms, figures.p99_ms)
    return tuple("" if value is None else milliseconds(value) for value in values)
