"""Verify a bundle on this device: load every variant that can run here, and run its self-test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from edgeq_device.bundle.opening import start_variant
from edgeq_device.bundle.package import MAIN, Bundle
from edgeq_device.bundle.select import Choice, DeviceFit, judge
from edgeq_device.bundle.selftest import SelfTestResult, run_selftest
from edgeq_device.engines.catalog import EngineSpec, describe_package, find_plugin, read_installed_version
from edgeq_device.engines.device import Device
from edgeq_device.engines.tensorrt import PROVIDER, build_trtexec_line
from edgeq_device.engines.variant import DRAWN, Variant
from edgeq_device.errors import BundleError, CheckFailedError, DataError, RuntimeUnavailableError
from edgeq_device.system.gpus import format_capability
from edgeq_device.trust.keys import Signer

PASSED, LOADED, FAILED, SKIPPED, UNUSED = "passed", "loaded", "failed", "not run", "not used"


@dataclass(frozen=True)
class VariantReport:
    """Report on one variant.

    Attributes:
        status: "passed" (the self-test passed), "loaded" (it loads and has no self-test), "failed", "not run", or "not
            used" (a plug-in engine is broken or wrong here, so the runner uses another variant).
        reason: why the variant failed, was not run or is not used, or the outputs that are not compared; otherwise "".
    """

    variant: Variant
    status: str
    reason: str
    selftest: Optional[SelfTestResult]

    def to_dict(self) -> Dict[str, Any]:
        """Return plain JSON values. An error that is infinite, because shape or dtype differ, becomes None."""
        outputs = self.selftest.outputs if self.selftest is not None else ()
        return {
            "component": self.variant.component,
            "variant": self.variant.name,
            "status": self.status,
            "reason": self.reason,
            "cases": len(self.variant.cases),
            "outputs": {check.name: check.to_dict() for check in outputs},
        }


@dataclass(frozen=True)
class Report:
    """Report on a whole bundle. The bundle is verified if nothing failed and a variant of the required component ran.

    Attributes:
        signer: signer of the bundle; None if there were no trusted keys with which to verify the signature.
        component: component of which a variant must have run; None if any component will do.
    """

    bundle: Bundle
    device: Device
    variants: Tuple[VariantReport, ...]
    signer: Optional[Signer] = None
    component: Optional[str] = None

    @property
    def passed(self) -> bool:
        """Return whether no variant failed and a variant of `component` was loaded or passed its self-test."""
        named = self.component
        statuses = (report.status for report in self.variants if named is None or report.variant.component == named)
        failed = any(report.status == FAILED for report in self.variants)
        return not failed and any(status in (PASSED, LOADED) for status in statuses)

    def __repr__(self) -> str:
        statuses = [report.status for report in self.variants]
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in sorted(set(statuses)))
        return f"Report(passed={self.passed}, variants: {counts})"

    def check(self) -> None:
        """Raise an error if the bundle is not verified.

        Raises:
            CheckFailedError: a variant failed.
            BundleError: no variant could run here.
        """
        failed = [report for report in self.variants if report.status == FAILED]
        if failed:
            raise CheckFailedError(
                f"{self.bundle.source}: variant {failed[0].variant.name} failed: {failed[0].reason}",
                "Do not deploy it on this device; package the model again, or choose another variant",
            )
        if not self.passed:
            why = "; ".join(f"{report.variant.name}: {report.reason}" for report in self.variants if report.reason)
            raise BundleError(
                f"{self.bundle.source}: no variant runs on this device ({why})",
                "Verify it on its device, or here with `edgeq verify BUNDLE --on all`, or package it for this device",
            )

    def to_dict(self) -> Dict[str, Any]:
        """Return the output of `verify --json`: plain JSON values, one entry for each variant."""
        return {
            **self.bundle.facts(),
            "signed": self.bundle.signature is not None,
            "signer": self.signer.to_dict() if self.signer is not None else None,
            "architecture": self.device.architecture,
            "onnxruntime": self.device.runtime,
            "passed": self.passed,
            "variants": [report.to_dict() for report in self.variants],
        }


def verify(bundle: Bundle, device: Device, name: Optional[str] = None, signer: Optional[Signer] = None) -> Report:
    """Load and self-test every variant that `device` can run. The others are listed with the reason.

    The hashes were checked when the bundle was opened. If a plug-in engine is broken or wrong here, the bundle fails
    only if `name` selects a variant of that engine. Otherwise another variant runs.

    Args:
        name: name of the variants to test; None tests all. Without a name, a variant of the quantized model must run:
            the float32 model is also in the bundle and runs anywhere, but it is not the model that is deployed.
        signer: signer of the bundle, from `edgeq_device.bundle.signature.check_signature`.

    Raises:
        BundleError: there is no variant of that name.
    """
    reports: List[VariantReport] = []
    for variants in bundle.components.values():
        for variant in variants:
            if name in (None, variant.name):
                report = _test_variant(variant, device)
                dispensable = name is None and find_plugin(variant.ep) is not None
                reports.append(replace(report, status=UNUSED) if report.status == FAILED and dispensable else report)
    if not reports:
        names = sorted({variant.name for variants in bundle.components.values() for variant in variants})
        raise BundleError(f"{bundle.source} has no variant {name!r}", f"It has {', '.join(names)}")
    return Report(bundle, device, tuple(reports), signer, MAIN if name is None else None)


def _test_variant(variant: Variant, device: Device) -> VariantReport:
    verdict = judge(variant, device)
    if not verdict.fits:
        return VariantReport(variant, SKIPPED, "; ".join(verdict.reasons), None)
    try:
        session = start_variant(variant)
        if not variant.cases:
            return VariantReport(variant, LOADED, _describe_uncompared(variant), None)
        result = run_selftest(variant, session)
        variant.check_unchanged()  # known only after the self-test has read its vectors
    except (BundleError, DataError, RuntimeUnavailableError) as error:
        return VariantReport(variant, FAILED, str(error), None)
    return VariantReport(
        variant, PASSED if result.passed else FAILED, result.reason or _describe_uncompared(variant), result
    )


def _describe_uncompared(variant: Variant) -> str:
    """Return which outputs the self-test leaves out because they depend on random numbers, or ""."""
    named = variant.info.get(DRAWN)
    names = [str(name) for name in named] if isinstance(named, list) else []
    return f"not compared, because they depend on random numbers: {', '.join(names)}" if names else ""


# Number of files to name in a line; a user's folder may contain thousands.
_NAMED = 5


def describe(bundle: Bundle, device: Device, choice: Optional[Choice]) -> Dict[str, Any]:
    """Return the output of `info --json`: the bundle, the device, and each variant with the verdict on it."""
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
                engine.name: {
                    "version": read_installed_version(engine),
                    "problem": device.plugins.get(engine.provider, ""),
                }
                for engine in _find_plugins(bundle)
            },
        },
        "chosen": choice.variant.name if choice else None,
        "why": choice.why if choice else None,
        "variants": variants,
        "metadata": dict(bundle.metadata),
    }


def _describe_variant(verdict: DeviceFit) -> Dict[str, Any]:
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
    """Return the output of `info`: size, hash and device, then a line for each variant with the verdict on it."""
    size = bundle.facts()["bytes"] / 1e6
    lines = [
        f"{bundle.name or bundle.source}: {len(bundle.files)} files, {size:.2f} MB, all hashes right",
        *extra_lines(bundle),
        hash_line(bundle.manifest_sha256),
        f"this device: {device.architecture}, onnxruntime {device.runtime}",
        *(f"  {gpu.name}, compute capability {format_capability(gpu.compute_capability)}" for gpu in device.gpus),
        *([f"  TensorRT {device.tensorrt}"] if device.tensorrt else []),
    ]
    for engine in _find_plugins(bundle):
        state = device.plugins.get(engine.provider, "") or describe_package(engine)
        lines.append(f"  engine {engine.name}: {state}")
    lines.append("")
    for variant in (variant for group in bundle.components.values() for variant in group):
        # `info` also lists bundles for other devices, of which no variant is chosen.
        verdict, is_chosen = judge(variant, device), choice is not None and variant is choice.variant
        state = "runs here" if verdict.fits else f"not here: {'; '.join(verdict.reasons)}"
        state = f"chosen: {choice.why}" if choice is not None and is_chosen else state
        lines.append(f"  {_name_variant(variant.component, variant.name)}: {state}")
        if is_chosen and variant.ep == PROVIDER:
            lines.append(f"    with TensorRT's own tool: {build_trtexec_line(variant, device.tensorrt, {})}")
    return lines


def _find_plugins(bundle: Bundle) -> List[EngineSpec]:
    """Return the plug-in engines for which the bundle has variants."""
    providers = dict.fromkeys(variant.ep for group in bundle.components.values() for variant in group)
    return [engine for engine in map(find_plugin, providers) if engine is not None]


def extra_lines(bundle: Bundle) -> List[str]:
    """Return a line with the files that do not belong to the bundle, or [] if there are none."""
    more = f" and {len(bundle.extra) - _NAMED} more" if len(bundle.extra) > _NAMED else ""
    return [f"not part of the bundle: {', '.join(bundle.extra[:_NAMED])}{more}"] if bundle.extra else []


def hash_line(digest: str) -> str:
    """Return a line with the hash that identifies the whole bundle. Users compare it with the sender's."""
    return f"manifest sha256 {digest}"


def report_lines(report: Report) -> List[str]:
    """Return the output of `verify`: the status of each variant, and each output's error and absolute tolerance."""
    lines = [f"{report.bundle.source}: {len(report.bundle.files)} files, all hashes right", *extra_lines(report.bundle)]
    if report.bundle.in_place:
        lines.append("opened in place, without a private copy: later changes are detected only by size and time")
    if report.signer is not None:
        lines.append(f"signed by {report.signer.name} ({report.signer.key})")
    elif report.bundle.signature is not None:
        lines.append("signed, but not checked against trusted keys (--trust)")
    lines.append(hash_line(report.bundle.manifest_sha256))
    return [*lines, *(line for entry in report.variants for line in variant_lines(entry.to_dict()))]


def variant_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines with the status of one variant and of each of its outputs, from the plain values of a
    `VariantReport`.
    """
    reason = f" ({report['reason']})" if report["reason"] else ""
    yield f"  {_name_variant(report['component'], report['variant'])}: {report['status']}{reason}"
    for name, check in report["outputs"].items():
        error = check["problem"] or f"max error {check['max_abs_error']:.3g}"
        yield f"    {name}: {error}, allowed {check['tolerance']:.3g}: {'ok' if check['passed'] else 'WRONG'}"


def _name_variant(component: str, variant: str) -> str:
    return variant if component == variant else f"{component}/{variant}"
