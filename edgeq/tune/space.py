"""The search space: the profile's own choice first, then what its [search] table allows, one coordinate at a time.

What decides speed (dtypes, weight granularity, format, session options) is a kernel choice; a calibration method only
moves scales and costs nothing at run time. So kernel choices are tried with the profile's method, and methods only on
the kernel choices that are worth it: a sum, not a product.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from edgeq.calibrate.methods import REGISTRY
from edgeq.engines import EngineChoice
from edgeq.hardware.profile import Profile
from edgeq.scheme import ALL_NODES, Scheme
from edgeq.tune.candidate import Candidate

_RANGE_FIELDS = frozenset({"method", "method_options"})
_DYNAMIC = "dynamic"


def kernel_candidates(profile: Profile, *, static: bool = True, dynamic: bool = False) -> tuple[Candidate, ...]:
    """The profile's scheme, and every other kernel choice of its search table that makes sense.

    Args:
        static: whether there are statistics to derive ranges from.
        dynamic: whether ranges measured at run time are worth trying: a model with matrix products of activations.
    """
    found: dict[str, Candidate] = {}
    if static:
        for scheme in _kernel_schemes(profile):
            candidate = Candidate(_name(scheme), scheme)
            found.setdefault(candidate.name, candidate)
    if dynamic and profile.scheme.dynamic_weight_types:
        for per_channel in dict.fromkeys((profile.scheme.per_channel, *profile.search.get("per_channel", ()))):
            scheme = profile.scheme.replace(mode=_DYNAMIC, per_channel=per_channel)
            candidate = Candidate(_name(scheme), scheme)
            found.setdefault(candidate.name, candidate)
    return tuple(found.values())


def method_candidates(candidate: Candidate, profile: Profile) -> tuple[Candidate, ...]:
    """`candidate` with every other calibration method of the profile's search table; empty for a dynamic one."""
    if candidate.scheme.mode != "static" or candidate.builder:
        return ()
    found: dict[str, Candidate] = {}
    for method in profile.search.get("method", ()):
        for options in REGISTRY.load(method).search:
            scheme = candidate.scheme.replace(method=method, method_options=options)
            made = with_scheme(candidate, scheme)
            if made.name != candidate.name:
                found.setdefault(made.name, made)
    return tuple(found.values())


def in_float(candidate: Candidate, nodes: Iterable[str]) -> Candidate:
    """`candidate` with `nodes` kept in float, too."""
    scheme = candidate.scheme.replace(exclude=(*candidate.scheme.exclude, *nodes))
    return with_scheme(candidate, scheme)


def in_engine(candidate: Candidate, choice: EngineChoice) -> Candidate:
    """`candidate`, run by `choice`."""
    return candidate.replace(name=f"{candidate.name} in {choice.name}", engine=choice)


def in_own_kernels(candidate: Candidate) -> Candidate:
    """`candidate`, run by onnxruntime's own kernels."""
    return with_scheme(candidate.replace(engine=None), candidate.scheme)


def with_scheme(candidate: Candidate, scheme: Scheme) -> Candidate:
    """`candidate` with another scheme, by which it is named."""
    made = candidate.replace(name=_name(scheme), scheme=scheme)
    return in_engine(made, candidate.engine) if candidate.engine else made


def thread_counts(cores: int) -> tuple[int, ...]:
    """Threads worth comparing on a machine of so many cores: all (0), half, one."""
    return (0,) if cores < 2 else tuple(dict.fromkeys((0, cores // 2, 1)))


def _kernel_schemes(profile: Profile) -> Iterator[Scheme]:
    yield profile.scheme
    axes: list[list[Mapping[str, Any]]] = []
    for field, values in sorted(profile.search.items()):
        if field not in _RANGE_FIELDS and field != "session_options":
            axes.append([{field: value} for value in values])
    for option, values in sorted(profile.search.get("session_options", {}).items()):
        axes.append([{"session_options": {option: value}} for value in values])
    for choice in itertools.product(*axes):
        changes: dict[str, Any] = {}
        session = dict(profile.scheme.session_options)
        for part in choice:
            session.update(part.get("session_options", {}))
            changes.update({k: v for k, v in part.items() if k != "session_options"})
        scheme = profile.scheme.replace(**changes, session_options=_needed(session))
        if _sensible(scheme, profile):
            yield scheme


def _needed(session: Mapping[str, str]) -> dict[str, str]:
    # "0" is what these switches are anyway; without it the same scheme has one name.
    return {key: value for key, value in session.items() if value != "0"}


def _sensible(scheme: Scheme, profile: Profile) -> bool:
    """Mitigations of saturation only where there is something that saturates, and one of them at a time."""
    saturating = profile.hazards.get("saturates_int16", ())
    saturates = scheme.pair in saturating or f"{scheme.pair}-{scheme.format}" in saturating
    precise = bool(scheme.session_options)
    if not saturates:
        return not (precise or scheme.fit_pairs) and scheme.reduce_range == (
            profile.scheme.reduce_range and scheme.pair == profile.scheme.pair
        )
    return sum((precise, scheme.reduce_range, scheme.fit_pairs)) <= 1


def _name(scheme: Scheme) -> str:
    """What distinguishes a scheme from the others of a run: "U8S8 per-channel, percentile 99.99"."""
    if scheme.mode == _DYNAMIC:
        return "dynamic per-channel" if scheme.per_channel else "dynamic per-tensor"
    parts = [scheme.pair, "per-channel" if scheme.per_channel else "per-tensor"]
    if scheme.format != "QDQ":
        parts.insert(0, scheme.format)
    if scheme.activation_symmetric:
        parts.append("symmetric")
    if not scheme.weight_symmetric:
        parts.append("asymmetric-weights")
    if scheme.reduce_range:
        parts.append("7-bit")
    if scheme.fit_pairs:
        parts.append("fitted")
    if scheme.wide:
        parts.append("on 16 bits" if ALL_NODES in scheme.wide else f"({len(scheme.wide)} on 16 bits)")
    parts += [f"{key.rpartition('.')[2]}={value}" for key, value in sorted(scheme.session_options.items())]
    method = [scheme.method, *(f"{value:g}" for value in scheme.method_options.values())]
    if scheme.exclude:
        method.append(f"({len(scheme.exclude)} in float)")
    return f"{' '.join(parts)}, {' '.join(method)}"
