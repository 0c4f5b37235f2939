"""What a report is made of, as values. Everything but the name may be missing; the page then leaves it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Pairs = tuple[tuple[str, str], ...]
FLOAT, INT8 = "float32", "int8"


@dataclass(frozen=True)
class Latency:
    """One model's latencies in milliseconds, throughput in samples a second, memory in bytes; None where not known.

    Attributes:
        counts: queries per bin of the timing's `edges_ms`; empty where there is no histogram.
        cv: standard deviation over mean.
    """

    name: str
    p50: float
    p90: float | None = None
    p99: float | None = None
    least: float | None = None
    mean: float | None = None
    cv: float | None = None
    queries: int | None = None
    samples_per_s: float | None = None
    peak_bytes: float | None = None
    counts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Ratio:
    """How many times faster than the baseline, with its confidence interval."""

    estimate: float
    low: float | None = None
    high: float | None = None

    @property
    def settled(self) -> bool:
        """Whether the interval leaves 1 out, so that a difference may be claimed."""
        if self.low is None or self.high is None:
            return self.estimate != 1
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Timing:
    """Latencies measured side by side.

    Attributes:
        scenario: such as "single-stream".
        edges_ms: of the histograms' bins, one more than there are bins.
        ratios: by model name, against the baseline.
    """

    models: tuple[Latency, ...]
    scenario: str = ""
    baseline: str = FLOAT
    edges_ms: tuple[float, ...] = ()
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    machine: Pairs = ()
    versions: Pairs = ()
    settings: Pairs = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metric:
    """One accuracy metric; `primary` is the one that decides."""

    name: str
    float32: float | None
    int8: float | None
    primary: bool = False
    higher_is_better: bool = True

    @property
    def gain(self) -> float | None:
        """int8 minus float32."""
        return None if self.float32 is None or self.int8 is None else self.int8 - self.float32


@dataclass(frozen=True)
class OutputAgreement:
    """How one output compares with the float model's."""

    name: str
    sqnr_db: float | None = None
    cosine: float | None = None
    max_abs_error: float | None = None
    top1: float | None = None
    equal: bool = False


@dataclass(frozen=True)
class Operator:
    """MACs of one kernel type, by what ran them, and how many of its nodes ran."""

    name: str
    int8_macs: float
    float_macs: float
    int8_nodes: int
    float_nodes: int


@dataclass(frozen=True)
class FloatNode:
    """A node that ran in float, and why."""

    name: str
    op_type: str
    macs: float
    reason: str


@dataclass(frozen=True)
class Coverage:
    """`share` of the MACs on integers; by operator; what did not, and why."""

    share: float
    int8_macs: float | None = None
    float_macs: float | None = None
    operators: tuple[Operator, ...] = ()
    float_nodes: tuple[FloatNode, ...] = ()
    float_node_count: int = 0


@dataclass(frozen=True)
class Layer:
    """One layer, in execution order.

    Attributes:
        sqnr_db: of its output against the float model's, dB, with all errors of the layers before it.
        own_db: of what this layer alone makes of the float model's inputs: the error that arises here.
        saturated: share of its output's values at an end of the integer range.
        float_us, int8_us: median time of what runs it in either model, microseconds.
        error_source: named as one that costs accuracy.
        advice: what would be done about it.
    """

    name: str
    op_type: str = ""
    sqnr_db: float | None = None
    own_db: float | None = None
    cosine: float | None = None
    saturated: float | None = None
    float_us: float | None = None
    int8_us: float | None = None
    int8_kind: str = ""
    error_source: bool = False
    advice: str = ""

    def error_db(self, *, alone: bool) -> float | None:
        """What layers are ranked by: their own error, where that was measured at all (`alone`), else the error so far.

        A layer that adds no error has none to be ranked by.
        """
        return self.own_db if alone else self.sqnr_db


def measured_alone(layers: Sequence[Layer]) -> bool:
    """Whether it is known what layers add by themselves."""
    return any(layer.own_db is not None for layer in layers)


@dataclass(frozen=True)
class Threshold:
    """A range and the method that gave it. `sqnr_db` is what it leaves of the tensor, quantized alone."""

    method: str
    low: float
    high: float
    sqnr_db: float | None = None


@dataclass(frozen=True)
class TensorHistogram:
    """What calibration saw of one tensor.

    Attributes:
        edges: of the bins, one more than there are counts.
        zeros: share of values that are exactly zero; they are not in `counts`.
        clipped: share of values outside the chosen range.
        chosen: method of the range in use.
    """

    name: str
    edges: tuple[float, ...]
    counts: tuple[float, ...]
    thresholds: tuple[Threshold, ...]
    chosen: str = ""
    zeros: float = 0.0
    clipped: float | None = None


@dataclass(frozen=True)
class Candidate:
    """One candidate of a tuning run.

    Attributes:
        accuracy: in the tuning's metric; None where it was dropped before that was measured.
        latency_ms: median; `low_ms` and `high_ms` bound it.
        status: "chosen", "front", "behind", "short" (of the accuracy), "slow" (than float32), "dropped" or "float32".
        reason: why it is not the chosen one.
    """

    name: str
    settings: Pairs = ()
    accuracy: float | None = None
    latency_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    bytes: float | None = None
    coverage: float | None = None
    status: str = "behind"
    reason: str = ""


@dataclass(frozen=True)
class Tuning:
    """What was searched and what came of it.

    Attributes:
        met: whether a candidate meets what was asked; None where the record does not say.
        least_accuracy: what was asked for, in the metric's unit; `allowed_loss` as a loss against float32.
        facts: what else is worth a line: objective, budget, seconds, candidates tried.
    """

    metric: str
    candidates: tuple[Candidate, ...]
    higher_is_better: bool = True
    least_accuracy: float | None = None
    allowed_loss: float | None = None
    met: bool | None = None
    facts: Pairs = ()
    notes: tuple[str, ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class Variant:
    """One way to run the model that the bundle carries, and its proof."""

    name: str
    title: str = ""
    bytes: float | None = None
    native: bool | None = None
    facts: Pairs = ()
    scheme: Pairs = ()
    session_options: Pairs = ()
    excluded: tuple[str, ...] = ()
    coverage: Coverage | None = None
    metrics: tuple[Metric, ...] = ()
    outputs: tuple[OutputAgreement, ...] = ()
    sqnr_db: float | None = None
    top1: float | None = None
    samples: int | None = None
    held_out: bool | None = None
    timing: Timing | None = None
    layers: tuple[Layer, ...] = ()
    conversion_us: float | None = None
    histograms: tuple[TensorHistogram, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def primary(self) -> Metric | None:
        return next((m for m in self.metrics if m.primary), self.metrics[0] if self.metrics else None)


@dataclass(frozen=True)
class ReportData:
    """All of it."""

    name: str
    variants: tuple[Variant, ...] = ()
    float_bytes: float | None = None
    tuning: Tuning | None = None
    timing: Timing | None = None
    machine: Pairs = ()
    versions: Pairs = ()
    identity: Pairs = ()
    commands: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Variant | None:
        """What the verdict is about: the variant that was timed, else one checked on its own kernels, else any."""
        timed = {m.name for m in self.timing.models} if self.timing else set()
        by_name = [v for v in self.variants if v.name in timed]
        native = [v for v in self.variants if v.native]
        return next(iter([*by_name, *native, *self.variants]), None)
