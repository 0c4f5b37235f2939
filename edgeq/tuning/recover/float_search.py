"""Leave layers in float until the outputs are close enough. This search implements `min_sqnr_db`.

Each set of nodes is judged as the proof judges the result: edgeq builds the model, opens it with the options that ship,
and counts outputs that are not finite as wrong. A set is first judged on a few calibration samples and, if it passes,
on the proof's own samples. A set fails if it cannot be built, or if it leaves nothing in int8.

edgeq first ranks layers by their own noise, to find the fewest layers. The ranking assumes that noises add up, although
errors may cancel or amplify each other. If no set in this order is good enough, edgeq puts layers in float in the
order of the graph, and then in reverse order.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgeq.data.samples import spread_over
from edgeq.errors import CheckFailedError, EdgeqError, UsageError, one_line
from edgeq.hardware.target import Target
from edgeq.measure.agreement import worst_db
from edgeq.prove.checks import agreements, int8_share
from edgeq.prove.job import Builder, Built, Job
from edgeq.scheme import Scheme
from edgeq.tuning.float_layers import REFINEMENTS, LayerRanking, RankedLayer, rank_by_probing, select_float_layers
from edgeq.tuning.recover.run import Recoverer, keep_better
from edgeq.tuning.recover.static_ranking import rank_static
from edgeq.tuning.recover.unit_costs import mac_costs
from edgeq.tuning.recover.units import find_units
from edgeq.util.display import SILENT, Progress
from edgeq.util.registry import RECOVERIES

SAMPLES = 16
"""Number of calibration samples on which each set of nodes is judged first."""
# In a ranking, any SQNR below this one counts as equal to it.
_LEAST_DB = -40.0


@dataclass
class FloatSearch:
    """Search for the nodes of one job and scheme that must stay in float.

    Attributes:
        names: recoveries that every build gets.
        count: number of calibration samples to judge by.
        timed: whether the cost of layers in float comes from the runtime's profile. Otherwise, it is their
            multiply-accumulates, which are the same everywhere.
        sqnr_by_nodes: SQNR in dB of each set tried. A set contains the nodes that are in float in addition to the
            scheme's own.
    """

    recoverer: Recoverer
    job: Job
    scheme: Scheme
    names: tuple[str, ...] = ()
    count: int = SAMPLES
    timed: bool = True
    progress: Progress = SILENT
    sqnr_by_nodes: dict[frozenset[str], float] = field(default_factory=dict)

    def reach(self, target_db: float, *, refinements: int = REFINEMENTS) -> tuple[str, ...] | None:
        """Return the nodes to keep in float so that the outputs reach `target_db`; None if no such set was found.

        Raises:
            EdgeqError: the scheme cannot be built even without changes.
        """
        # The build without changes comes first: it may be good enough, and its errors are the user's to see.
        plain_db = self.measure((), target_db)
        if plain_db >= target_db:
            return ()
        for ranking in self.rankings(target_db):
            sets = select_float_layers(
                ranking,
                lambda nodes: -self.measure(nodes, target_db),
                -target_db,
                lambda: False,
                share=10 ** ((plain_db - target_db) / 10),
                refinements=refinements,
            )
            if sets:
                return sets[-1]
        return None

    @property
    def best(self) -> tuple[tuple[str, ...], float]:
        """Return the nodes that brought the outputs closest, and the SQNR in dB. If several sets reach the same SQNR,
        return the one with the fewest nodes.
        """
        nodes = max(self.sqnr_by_nodes, key=lambda nodes: (self.sqnr_by_nodes[nodes], -len(nodes)))
        order = [str(node.name) for node in self.job.prepared.model.graph]
        return tuple(name for name in order if name in nodes), self.sqnr_by_nodes[nodes]

    def measure(self, nodes: Sequence[str], target_db: float) -> float:
        """Return the SQNR in dB with `nodes` in float. Return minus infinity if that model cannot be built, or its
        outputs are not finite.

        Raises:
            EdgeqError: `nodes` is empty, and the scheme cannot be built.
        """
        key = frozenset(nodes)
        if key not in self.sqnr_by_nodes:
            try:
                sqnr_db = self._measure(nodes, target_db)
            except EdgeqError as error:
                if not nodes:
                    raise
                self.progress.note(f"{len(nodes)} nodes cannot stay in float: {error.problem}")
                sqnr_db = -math.inf
            else:
                self.progress.note(f"{len(nodes)} nodes in float: {sqnr_db:.1f} dB")
            self.sqnr_by_nodes[key] = sqnr_db
        return self.sqnr_by_nodes[key]

    def in_float(self, nodes: Sequence[str]) -> Scheme:
        """Return the scheme with `nodes` excluded as well."""
        return self.scheme.keep_in_float(nodes, "kept in float to reach ⟨min_sqnr_db⟩")

    def _measure(self, nodes: Sequence[str], target_db: float) -> float:
        """Return the SQNR on calibration samples. If it reaches `target_db`, the proof's SQNR is also measured, and the
        lower of the two is returned.
        """
        job, calibration = self.job, self.job.calibration
        assert calibration is not None
        built = self.recoverer.build(self.in_float(nodes), self.names, self.recoverer.place() / "tried.onnx")
        # A model without int8 would reach any SQNR, but then nothing is quantized.
        if nodes and not int8_share(job, built):
            return -math.inf
        subset = spread_over(calibration, self.count)
        sqnr_db = worst_db(agreements(job, {"": built.artifact}, subset)[""])
        # The proof's samples cost more, so only a set that passes on the few samples is judged on them.
        if sqnr_db < target_db or subset is job.validation:
            return sqnr_db
        return min(sqnr_db, worst_db(agreements(job, {"": built.artifact}, job.validation)[""]))

    def rankings(self, target_db: float) -> Iterator[LayerRanking]:
        """Yield orders in which layers go to float. The order that should need the fewest layers comes first."""
        yield self._rank_by_noise(target_db)
        units = [unit for unit in find_units(self.job.prepared.model) if not {*unit.nodes} <= {*self.scheme.exclude}]
        costs = mac_costs(units, self.job.prepared.model)
        layers = tuple(RankedLayer(unit.name, unit.nodes, 0.0) for unit in units)
        yield LayerRanking(layers, costs)
        yield LayerRanking(layers[::-1], costs)

    def _rank_by_noise(self, target_db: float) -> LayerRanking:
        """Return the ranking by each layer's own noise. If the quantized model's tensors match the float model's, the
        noise is computed from them. Otherwise it is measured on builds with all other layers in float.
        """
        try:
            return rank_static(
                self.recoverer,
                self.job,
                self.scheme,
                self.names,
                timed=self.timed,
                progress=self.progress,
            )
        # The batch or the names may differ, because not every target's model is a Q/DQ form of the float model.
        except EdgeqError as error:
            self.progress.note(
                f"layers are ranked by building with few of them in int8, not by tensors: {one_line(error, most=200)}"
            )
        units = {unit.name: unit for unit in find_units(self.job.prepared.model)}
        costs = mac_costs(list(units.values()), self.job.prepared.model)
        macs = {name: work for name, work in costs.macs.items() if work}

        def noise(names: Sequence[str]) -> float:
            """Return the noise power over the signal power if only these layers are quantized."""
            float_nodes = [node for name in macs if name not in names for node in units[name].nodes]
            # Minus infinity decibels would be infinite noise, which a ranking cannot add up.
            return 10 ** (-max(_LEAST_DB, self.measure(float_nodes, target_db)) / 10)

        return rank_by_probing(macs, noise, lambda: False)


_LISTED = 8


def recovering(*names: str, min_sqnr_db: float | None = None) -> Builder:
    """Return a builder with the recoveries `names`, in any order, for `edgeq.quantize(..., builder=this)`.

    Args:
        min_sqnr_db: SQNR in dB that the worst output must reach on calibration samples. Layers are kept in float until
            it does. The layers are chosen so that, according to the runtime's own profile, they cost as little time as
            possible.

    Raises:
        UsageError: a recovery is unknown, or `min_sqnr_db` is not a finite number.
    """
    if min_sqnr_db is not None and not math.isfinite(min_sqnr_db):
        raise UsageError(f"⟨min_sqnr_db⟩ {min_sqnr_db} is not a number of decibels", "Write one such as 20")
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"a recovery is given as {type(name).__name__}", "Give names, one after the other")
        RECOVERIES.check(name)

    def build(job: Job, target: Target, scheme: Scheme, destination: Path, progress: Progress) -> Built:
        """Build with the layers in float that `min_sqnr_db` requires, and with the recoveries unless they do harm."""
        # The folder is next to the prepared model, because an artifact may refer to files there until the job ends.
        workdir = Path(tempfile.mkdtemp(prefix="recover-", dir=job.prepared.path.parent))
        recoverer = Recoverer(job, target, workdir)
        closer = scheme
        if min_sqnr_db is not None:
            if scheme.mode != "static":
                raise UsageError("⟨min_sqnr_db⟩ needs a static scheme", "Leave it out, or choose another scheme")
            closer = _find_closer_scheme(recoverer, job, scheme, names, min_sqnr_db, progress)
        recovered = recoverer.build(closer, names, destination, progress=progress)
        return keep_better(job, recovered, scheme, names, workdir, progress) if names else recovered

    return build


def _find_closer_scheme(
    recoverer: Recoverer, job: Job, scheme: Scheme, names: tuple[str, ...], min_sqnr_db: float, progress: Progress
) -> Scheme:
    """Return the scheme with the layers in float that reach `min_sqnr_db` at the least cost."""
    search = FloatSearch(recoverer, job, scheme, names, progress=progress)
    float_nodes = search.reach(min_sqnr_db)
    if float_nodes is not None:
        return search.in_float(float_nodes)
    nodes, best = search.best
    if best == -math.inf:
        raise CheckFailedError(
            f"{job.source}: the outputs are not finite, whichever layers stay in float",
            "Leave ⟨min_sqnr_db⟩ out, and choose another scheme or `⟨exclude⟩` nodes by hand",
        )
    listed = ", ".join(nodes[:_LISTED]) + (f" and {len(nodes) - _LISTED} more" if len(nodes) > _LISTED else "")
    summary = f"{len(nodes)} in float: {listed}" if nodes else "none in float"
    # Round down, because the message offers this number as a limit that can be reached.
    reached = math.floor(10 * best) / 10
    raise CheckFailedError(
        f"{job.source}: layers in float bring the outputs to {reached:.1f} dB, not to {min_sqnr_db:g} ({summary})",
        f"Type ⟨min_sqnr_db⟩ {reached:.1f}, add ⟨recover⟩, or choose another scheme",
    )
