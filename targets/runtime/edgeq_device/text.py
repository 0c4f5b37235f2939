"""What the runner prints for people. The JSON forms are the `to_dict` of the values themselves."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional

from edgeq_device.cuda import capability_text
from edgeq_device.engines import EngineSpec, installed_version, plugin_of
from edgeq_device.package import Bundle
from edgeq_device.select import Choice, Device, Verdict, judge
from edgeq_device.tensorrt import PROVIDER, trtexec_line
from edgeq_device.verify import Report

_NAMED = 5


def describe(bundle: Bundle, device: Device, choice: Optional[Choice]) -> Dict[str, Any]:
    """What `info --json` prints: the bundle, the device, and each variant with the verdict on it."""
    variants = [_describe_variant(judge(variant, device)) for group in bundle.components.values() for variant in group]
    return {
        **bundle.facts(),
        "device": {
            "architecture": device.architecture,
            "features": sorted(device.features),
            "onnxruntime": device.runtime,
            "providers": list(device.providers),
            "gpus": [gpu.to_dict() for gpu in device.gpus],
            "tensorrt": device.tensorrt,
            "engines": {
                engine.name: {"version": installed_version(engine), "problem": device.plugins.get(engine.provider, "")}
                for engine in _plugins(bundle)
            },
        },
        "chosen": choice.variant.name if choice else None,
        "why": choice.why if choice else None,
        "variants": variants,
        "metadata": dict(bundle.metadata),
    }


def _describe_variant(verdict: Verdict) -> Dict[str, Any]:
    variant = verdict.variant
    return {
        "component": variant.component,
        "variant": variant.name,
        "ep": variant.ep,
        "architecture": variant.architecture,
        "required_features": list(variant.required_features),
        "rank": variant.rank,
        "min_onnxruntime": variant.min_onnxruntime,
        "session_options": dict(variant.session_options),
        "runs_here": verdict.fits,
        "reasons": list(verdict.reasons),
        "info": dict(variant.info),
    }


def info_lines(bundle: Bundle, device: Device, choice: Optional[Choice]) -> List[str]:
    """What `info` prints: size, hash and device, then a line for each variant with the verdict on it."""
    size = bundle.facts()["bytes"] / 1e6
    lines = [
        f"{bundle.name or bundle.source}: {len(bundle.files)} files, {size:.2f} MB, all hashes right",
        *extra_lines(bundle),
        hash_line(bundle.manifest_sha256),
        f"this device: {device.architecture}, onnxruntime {device.runtime}",
        *(f"  {gpu.name}, compute capability {capability_text(gpu.compute_capability)}" for gpu in device.gpus),
        *([f"  TensorRT {device.tensorrt}"] if device.tensorrt else []),
        *(f"  engine {engine.name}: {_engine_state(engine, device)}" for engine in _plugins(bundle)),
        "",
    ]
    for group in bundle.components.values():
        for variant in group:
            lines.append(_variant_line(judge(variant, device), choice))
            if choice is not None and variant is choice.variant and variant.ep == PROVIDER:
                lines.append(f"    with TensorRT's own tool: {trtexec_line(variant, device.tensorrt, {})}")
    return lines


def _plugins(bundle: Bundle) -> List[EngineSpec]:
    """The plug-in engines that the bundle has variants for."""
    providers = dict.fromkeys(variant.ep for group in bundle.components.values() for variant in group)
    return [engine for engine in map(plugin_of, providers) if engine is not None]


def _engine_state(engine: EngineSpec, device: Device) -> str:
    return device.plugins.get(engine.provider, "") or f"{engine.packages[0]} {installed_version(engine)}"


def _variant_line(verdict: Verdict, choice: Optional[Choice]) -> str:
    variant = verdict.variant
    if choice is not None and variant is choice.variant:
        state = f"chosen: {choice.why}"
    else:
        state = "runs here" if verdict.fits else f"not here: {'; '.join(verdict.reasons)}"
    return f"  {_name(variant.component, variant.name)}: {state}"


def extra_lines(bundle: Bundle) -> List[str]:
    """A line with the files beside the bundle's own, where there are any."""
    more = f" and {len(bundle.extra) - _NAMED} more" if len(bundle.extra) > _NAMED else ""
    return [f"not part of the bundle: {', '.join(bundle.extra[:_NAMED])}{more}"] if bundle.extra else []


def hash_line(digest: str) -> str:
    """The hash that stands for the whole bundle, for comparison with what the sender says."""
    return f"manifest sha256 {digest}"


def report_lines(report: Report) -> List[str]:
    """What `verify` prints: the status of each variant, and of each output its error and tolerance (absolute)."""
    lines = [f"{report.bundle.source}: {len(report.bundle.files)} files, all hashes right", *extra_lines(report.bundle)]
    if report.bundle.in_place:
        lines.append("opened in place, without a private copy: changes after the hashes show by size and time alone")
    if report.signer is not None:
        lines.append(f"signed by {report.signer.name} ({report.signer.key})")
    elif report.bundle.signature is not None:
        lines.append("signed; whether by a key that you trust was not checked (--trust)")
    lines.append(hash_line(report.bundle.manifest_sha256))
    return [*lines, *(line for entry in report.variants for line in variant_lines(entry.to_dict()))]


def variant_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The status of one variant and each of its outputs, from the plain values of a `VariantReport`."""
    reason = f" ({found['reason']})" if found["reason"] else ""
    yield f"  {_name(found['component'], found['variant'])}: {found['status']}{reason}"
    for name, check in found["outputs"].items():
        error = check["problem"] or f"max error {check['max_error']:.3g}"
        yield f"    {name}: {error}, allowed {check['tolerance']:.3g}: {'ok' if check['passed'] else 'WRONG'}"


def _name(component: str, variant: str) -> str:
    return variant if component == variant else f"{component}/{variant}"
