"""Choose the variant to run on this device, and give the reasons against the other variants.

A variant lists the kinds of integer products in its model ("Conv u8s8") as `products`. The list shows which releases of
onnxruntime would compute the model incorrectly. Older bundles have no such list. For their variants, only the self-test
finds wrong kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Collection, List, Mapping, Optional, Tuple

from edgeq_device.bundle.package import MAIN, Bundle
from edgeq_device.engines.catalog import EngineSpec, WrongKernels, find_plugin, load_wrong_kernels, parse_version
from edgeq_device.engines.device import Device
from edgeq_device.engines.variant import Variant, read_precision
from edgeq_device.errors import BundleError
from edgeq_device.system.gpus import format_capability


def find_wrong_kernels(
    version: str, architecture: str, features: Collection[str], provider: str = "CPUExecutionProvider"
) -> Tuple[WrongKernels, ...]:
    """Return the known faults of one release of onnxruntime on one CPU."""
    rows = [row for row in load_wrong_kernels() if row.provider == provider]
    return tuple(row for row in rows if row.in_release(version) and row.on(architecture, features))


@dataclass(frozen=True)
class DeviceFit:
    """Hold whether a variant fits a device. `reasons` lists what the device lacks; it is empty if the variant fits."""

    variant: Variant
    reasons: Tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Return whether the device has everything that the variant requires."""
        return not self.reasons


@dataclass(frozen=True)
class Choice:
    """Hold the variant to run, the reason for it, and the verdicts on the other variants, in the bundle's order."""

    variant: Variant
    why: str
    rejected: Tuple[DeviceFit, ...]


def judge(variant: Variant, device: Device) -> DeviceFit:
    """Check whether a device fits one variant. The criteria are the architecture, the features, the execution provider,
    the version of onnxruntime, and known faults.
    """
    # Collect all reasons, not only the first, so that the user can fix them in one go.
    reasons: List[str] = []
    if variant.model is None:
        reasons.append("ONNX Runtime does not run it")
    if variant.architecture not in ("any", device.architecture):
        reasons.append(f"it is for {variant.architecture}, this device is {device.architecture}")
    else:
        missing = [feature for feature in variant.required_features if feature not in device.features]
        if missing:
            reasons.append(f"this device has no {', '.join(missing)}")
    engine = find_plugin(variant.ep)
    if engine is not None and variant.ep in device.plugins:
        reasons.extend(_find_engine_reasons(variant, engine, device))
    elif variant.ep not in device.providers:
        reasons.append(f"onnxruntime {device.runtime} here has no {variant.ep}")
    reasons.extend(_find_gpu_reasons(variant, device))
    if parse_version(device.runtime) < parse_version(variant.min_onnxruntime):
        reasons.append(f"it needs onnxruntime {variant.min_onnxruntime}, this device has {device.runtime}")
    reasons.extend(_find_wrong_reasons(variant, device))
    return DeviceFit(variant, tuple(reasons))


def _find_wrong_reasons(variant: Variant, device: Device) -> List[str]:
    """Return the faults of this release of onnxruntime on this device that affect the variant."""
    products = variant.info.get("products", [])
    if not isinstance(products, list) or not all(isinstance(product, str) for product in products):
        raise BundleError(f"variant {variant.name}: products is not a list of strings")
    wrong = find_wrong_kernels(device.runtime, device.architecture, device.features, variant.ep)
    return [row.explain(device.runtime, products) for row in wrong if set(row.products).intersection(products)]


def _find_engine_reasons(variant: Variant, engine: EngineSpec, device: Device) -> List[str]:
    """Return what `variant` needs from a plug-in engine but `device` lacks."""
    precision = read_precision(variant, engine)
    fast_on = engine.precisions[precision].fast_on
    reasons = [device.plugins[variant.ep]] if device.plugins[variant.ep] else []
    if fast_on and not device.features.intersection(fast_on):
        reasons.append(f"{precision} is slow in {engine.name} without {' or '.join(fast_on)}")
    return reasons


def _find_gpu_reasons(variant: Variant, device: Device) -> List[str]:
    """Return what `variant` needs from a GPU and from TensorRT but `device` lacks."""
    limits = {key: variant.info.get(key, "") for key in ("min_compute_capability", "min_tensorrt", "below_tensorrt")}
    reasons: List[str] = []
    capability = limits["min_compute_capability"]
    if capability and not device.gpus:
        reasons.append(device.gpu_problem or "this device has no NVIDIA GPU")
    # One GPU that is new enough suffices.
    elif capability and all(gpu.compute_capability < parse_version(capability) for gpu in device.gpus):
        best = max(device.gpus, key=lambda gpu: gpu.compute_capability)
        have = format_capability(best.compute_capability)
        reasons.append(f"it needs compute capability {capability}, {best.name} has {have}")
    oldest, below = limits["min_tensorrt"], limits["below_tensorrt"]
    if (oldest or below) and variant.ep in device.providers:
        if not device.tensorrt:
            reasons.append(device.tensorrt_problem or "TensorRT is not installed")
        elif oldest and parse_version(device.tensorrt) < parse_version(oldest):
            reasons.append(f"it needs TensorRT {oldest}, this device has {device.tensorrt}")
        elif below and parse_version(device.tensorrt) >= parse_version(below):
            reasons.append(f"it needs a TensorRT below {below}, this device has {device.tensorrt}")
    return reasons


def select(
    bundle: Bundle,
    device: Device,
    component: str = MAIN,
    name: Optional[str] = None,
    *,
    failed: Optional[Mapping[str, str]] = None,
) -> Choice:
    """Choose the variant of `component` with the highest rank among those that fit. In a tie, the first in the bundle
    wins.

    Args:
        name: name of the only variant that may be chosen; None allows all.
        failed: reason why each variant that was tried did not open, keyed by the variant's name.

    Raises:
        BundleError: there is no such component or variant, or no variant fits; the message gives each reason.
    """
    variants = bundle.components.get(component, ())
    if not variants:
        raise BundleError(f"{bundle.source} has no component {component}")
    verdicts = [judge(variant, device) for variant in variants]
    failures = {variant.name: (reason,) for variant in variants if (reason := (failed or {}).get(variant.name))}
    # A variant that did not open stays in the list, with its reason, for the report.
    verdicts = [DeviceFit(v.variant, v.reasons + failures.get(v.variant.name, ())) for v in verdicts]
    if name is not None:
        named = next((verdict for verdict in verdicts if verdict.variant.name == name), None)
        if named is None:
            names = ", ".join(variant.name for variant in variants)
            raise BundleError(f"{bundle.source} has no variant {name!r}", f"It has {names}")
        if not named.fits:
            raise BundleError(f"{bundle.source}: variant {name} does not run here: {'; '.join(named.reasons)}")
        return Choice(named.variant, "it was asked for", tuple(v for v in verdicts if v is not named))
    fitting = [verdict for verdict in verdicts if verdict.fits]
    if not fitting:
        why = "; ".join(f"{v.variant.name}: {', '.join(v.reasons)}" for v in verdicts)
        fix = f"Package the model for a target of this device's kind ({device.architecture})"
        # Find the variants for which only a newer onnxruntime is missing.
        versions = [v.variant.min_onnxruntime for v in verdicts if len(v.reasons) == 1]
        newer = [version for version in versions if parse_version(device.runtime) < parse_version(version)]
        if newer:
            fix = f"Install onnxruntime {min(newer, key=parse_version)} or newer"
        raise BundleError(f"{bundle.source} has no variant for this device ({why})", fix)
    # Of equal ranks, max takes the first, which the packager prefers.
    best = max(fitting, key=lambda verdict: verdict.variant.rank)
    why = "it is the only one that runs here" if len(fitting) == 1 else f"rank {best.variant.rank} is the highest here"
    if best.variant.required_features:
        why += f"; this device has {', '.join(best.variant.required_features)}"
    return Choice(best.variant, why, tuple(v for v in verdicts if v is not best))
