"""A bundle's variant for this device, and its float32 model if it carries one, as models of a benchmark."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Sequence, Tuple

from edgeq_device.arrays import read_arrays
from edgeq_device.bench_models import BenchModel, Shapes
from edgeq_device.engines import FLOAT as FLOAT32
from edgeq_device.engines import plugin_of
from edgeq_device.memory import MemoryUse, measure_memory
from edgeq_device.opening import open_best, open_variant
from edgeq_device.package import FLOAT, Bundle
from edgeq_device.scenarios import Feed
from edgeq_device.select import Device, precision_of
from edgeq_device.serve import open_request
from edgeq_device.variants import Variant


def bundle_variants(
    bundle: Bundle, device: Device, name: Optional[str] = None
) -> Tuple[List[Variant], Tuple[str, ...]]:
    """The float32 variant that runs here, where the bundle has one, then the one chosen (or named); and why each better
    variant was passed over.

    Raises:
        BundleError: nothing in the bundle runs on this device, or not what was named.
    """
    opened = open_best(bundle, device, name=name)
    variants = [opened.choice.variant]
    if FLOAT in bundle.components:
        variants.insert(0, open_best(bundle, device, component=FLOAT).choice.variant)
    return variants, opened.passed_over


def bundle_models(variants: Sequence[Variant]) -> List[BenchModel]:
    """Subjects named like their variant; those of the component "float32" are named so."""
    return [
        BenchModel(
            FLOAT if variant.component == FLOAT else variant.name,
            partial(open_variant, variant),
            partial(_memory, variant),
        )
        for variant in variants
    ]


def bundle_feeds(variants: Sequence[Variant]) -> Optional[Callable[[Any], Sequence[Feed]]]:
    """The inputs of the self-test as samples, in the form that `bench_models` takes; None where there are none."""
    cases = [case for variant in variants for case in variant.cases]
    if not cases:
        return None
    paths = sorted({case.inputs for case in cases})
    return lambda session: [read_arrays(path) for path in paths]


def _memory(variant: Variant, threads: int, shapes: Shapes) -> MemoryUse:
    plugin = plugin_of(variant.ep)
    precision = precision_of(variant, plugin) if plugin is not None else FLOAT32
    return measure_memory(open_request(variant, threads, precision), shapes)
