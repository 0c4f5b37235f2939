"""Show machines, profiles and targets as plain values for JSON, and as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgeq_device.system.gpus import format_capability

from edgeq.hardware.detect import Machine
from edgeq.hardware.engines import EngineState, list_wrong_kernels
from edgeq.hardware.measured import load_reports
from edgeq.hardware.profile import Profile, ProfileMatch
from edgeq.hardware.target import Target
from edgeq.run.engines import find_only_engine, load_engines
from edgeq.util.records import plain

_KINDS = {"data": "d", "instruction": "i"}
Page = tuple[dict[str, Any], list[str]]


def describe_machine(
    machine: Machine,
    match: ProfileMatch,
    profiles: Mapping[str, Profile],
    engines: Sequence[EngineState],
    *,
    every_feature: bool,
) -> list[str]:
    """Return lines that describe a machine, the profile that fits it, and its engines.

    Args:
        every_feature: whether to list all CPU features. Otherwise only the features that some profile requires are
            listed.
    """
    required = frozenset().union(*(profile.requires for profile in profiles.values()))
    # Modern CPUs list over a hundred features, and only those that choose a profile matter to most users.
    features = machine.features if every_feature else machine.features & required
    name = machine.cpu_name or "unknown CPU"
    gpus = [
        f"{gpu.name}, compute capability {format_capability(gpu.compute_capability)}, "
        f"{_format_size(gpu.memory_bytes)}, driver {gpu.driver or 'unknown'}"
        for gpu in machine.gpus
    ]
    rows = [
        ("CPU", f"{name} ({machine.vendor})" if machine.vendor else name),
        ("board", machine.board),
        ("system", f"{machine.architecture}, {machine.os}"),
        ("cores", f"{machine.cores or '?'}, {machine.threads or '?'} threads, {machine.usable_threads} usable here"),
        ("features", ", ".join(sorted(features)) or "none known"),
        ("caches", ", ".join(f"L{c.level}{_KINDS.get(c.kind, '')} {_format_size(c.size)}" for c in machine.caches)),
        ("memory", _format_size(machine.memory_bytes or None)),
        *[("GPU", gpu) for gpu in gpus or ["none"]],
        ("runtimes", ", ".join(f"{name} {version}" for name, version in sorted(machine.runtimes.items()))),
        *[("engine", _describe_engine(state)) for state in engines],
        *[("wrong", row.explain(machine.onnxruntime or "")) for row in list_wrong_kernels(machine)],
        *[("note", note) for note in machine.notes],
        ("profile", f"{match.profile.name}: {match.profile.title}"),
        *[("because" if index == 0 else "", line) for index, line in enumerate(match.explain())],
    ]
    # A row without a value would look like a failed detection.
    return _align_rows([row for row in rows if row[1]])


def list_profiles(profiles: Mapping[str, Profile]) -> Page:
    """Return all profiles, in order of rank."""
    record = {"profiles": [plain(profile) for profile in profiles.values()]}
    rows = [
        (p.name, p.backend, p.scheme.pair + ("r" if p.scheme.reduce_range else ""), p.title) for p in profiles.values()
    ]
    legend = "U8S8: uint8 activations, int8 weights; r: weights reduced to 7 bits. `edgeq profiles show NAME ⟨why⟩`"
    return record, [*_align_rows(rows), "", legend]


def describe_profile(profile: Profile, *, why: bool) -> Page:
    """Return one profile. With `why`, add a reason and a source under each default."""
    capability = profile.min_compute_capability
    needs = [
        *([] if profile.architecture == "any" else [profile.architecture]),
        *sorted(profile.requires),
        *([] if capability is None else [f"compute capability {format_capability(capability)}"]),
        *sorted(profile.requires_runtimes),
    ]
    rows = [
        ("title", profile.title),
        ("needs", ", ".join(needs) or "nothing"),
        ("rank", str(profile.rank)),
        ("extends", profile.extends or ""),
        ("never run", profile.never_run),
        ("layers", "only in integers" if profile.integer_only else ""),
        ("backend", profile.backend),
        ("onnxruntime", f"{profile.min_onnxruntime} or newer"),
        ("files", ", ".join(str(path) for path in profile.files) if why else ""),
    ]
    lines = [
        profile.name,
        *_align_rows([row for row in rows if row[1]]),
        "",
        "scheme",
        *_describe_scheme(profile, why=why),
    ]
    # Notes stand among the hazards in the file, but they are texts by topic, so they are shown last.
    hazards = {key: value for key, value in profile.hazards.items() if key != "notes"}
    hazards |= profile.hazards.get("notes", {})
    for title, table in (("hazards", hazards), ("search", profile.search), ("emulate", profile.emulate)):
        if table:
            lines += ["", title, *_align_rows([(key, _format_value(value)) for key, value in table.items()])]
    # The JSON form is always complete. Only the lines depend on the options.
    return plain(profile), lines


def list_targets(targets: Mapping[str, Target]) -> Page:
    """Return all targets, by name."""
    rows = [(t.name, t.profile.name, f"{t.title}{' *' if t.profile.never_run else ''}") for t in targets.values()]
    lines = [
        *_align_rows(rows),
        "",
        "* not everything was run on such hardware: `edgeq targets show NAME` lists what was not",
    ]
    return {"targets": [plain(target) for target in targets.values()]}, lines


def describe_target(target: Target, *, why: bool) -> Page:
    """Return one target: the facts known about the device, what was measured on such boards, and its profile with the
    target's overrides.
    """
    rows = [
        ("title", target.title),
        ("architecture", target.architecture),
        ("features", ", ".join(sorted(target.features))),
    ]
    tables = (("runtime", target.runtime), ("device", target.device), ("systolic", target.systolic))
    rows += [(title, _format_value(table)) for title, table in tables]
    reports = [report for report in load_reports() if report.target == target.name]
    rows += [("measured", line) for report in reports for line in report.lines()]
    _, profile_lines = describe_profile(target.profile, why=why)
    lines = [
        target.name,
        *_align_rows([row for row in rows if row[1]]),
        "",
        f"profile {profile_lines[0]}",
        *profile_lines[1:],
    ]
    return {**plain(target), "measured": plain(reports)}, lines


def _describe_scheme(profile: Profile, *, why: bool) -> list[str]:
    values = plain(profile.scheme)
    # The file calls this table "dynamic", and people compare the output with the file.
    values["dynamic"] = values.pop("dynamic_weight_types")
    lines = []
    for name, value in values.items():
        if name not in profile.why and not value:
            continue  # fields that neither the profile nor the user sets, such as op_types and exclude
        lines.append(f"  {name:<20} {_format_value(value)}")
        if why and name in profile.why:
            lines += [f"    {profile.why[name]}", f"    [{profile.source[name]}]"]
    if why and "min_onnxruntime" in profile.why:
        lines += [f"  {'min_onnxruntime':<20} {profile.min_onnxruntime}", f"    {profile.why['min_onnxruntime']}"]
        lines.append(f"    [{profile.source['min_onnxruntime']}]")
    return lines


def _describe_engine(state: EngineState) -> str:
    if not state.version:
        engine = load_engines().get(state.name)
        dedicated = engine is not None and find_only_engine(engine.int8.backend) is not None
        use = "Its own targets need it" if dedicated else "It may be faster"
        return f"{state.name} is not installed: {state.title}. {use}: {state.install}"
    detail = (
        state.problem or f"fast here in {', '.join(state.precisions)}; int8 {', '.join(state.int8_pairs) or 'unknown'}"
    )
    return f"{state.name} {state.version}: {detail}"


def _align_rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows in aligned columns. The last column is not padded."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    # Padding the last column would only add spaces at the ends of the lines.
    return [
        "  " + "  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_format_value(item)}" for key, item in value.items())
    # bool is an int in Python, so it must be tested before numbers reach str().
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_format_value(item) for item in value) or "none"
    return str(value)


def _format_size(size: int | None) -> str:
    if size is None:
        return "memory unknown"
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size} B"
