"""Describe what goes into a bundle. A wrong description is refused here, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.bundle.names import is_plain_name
from edgeq_device.engines.options import provider_problem, session_problem
from edgeq_device.engines.variant import SliceTolerance
from edgeq_device.measure.basis import EVERYTHING, Basis

from edgeq.errors import UsageError

Arrays = Mapping[str, np.ndarray[Any, Any]]
DEVICES = ("cpu", "gpu", "npu")
# What lies at the top of a bundle, now or in bundles of earlier versions.
_RESERVED_NAMES = frozenset(
    {
        "__main__.py",
        "calibration.zip",
        "edgeq_device",
        "edgeq_device.zip",
        "edgeq_run.py",
        "files",
        "manifest.json",
        "model.sig",
        "models",
        "sbom.cdx.json",
        "selftest.npz",
        "shared_assets",
    }
)
_RESERVED_METADATA = ("bundle_schema", "tools", "files")


@dataclass(frozen=True)
class SelfTestCase:
    """Store the inputs of one sample and the expected outputs by name, as `session.run` takes and returns them."""

    inputs: Arrays
    outputs: Arrays


@dataclass(frozen=True)
class SelfTestSpec:
    """Describe the self-test of a variant.

    Attributes:
        tolerance: allowed absolute difference of each output, for all cases.
        slices: allowed differences for parts of an output that have another unit than the rest.
        basis: what the tolerances apply to.
    """

    cases: tuple[SelfTestCase, ...] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)
    slices: Mapping[str, tuple[SliceTolerance, ...]] = field(default_factory=dict)
    basis: Basis = EVERYTHING

    def check(self, context: str) -> None:
        """Check that every output has a tolerance.

        Raises:
            UsageError: an output has no tolerance, or a tolerance names an output that no case has.
        """
        outputs = {name for case in self.cases for name in case.outputs}
        if outputs != set(self.tolerance):
            odd = sorted(outputs ^ set(self.tolerance))
            raise UsageError(f"{context}: self-test outputs and tolerances differ in {odd[0]!r}")
        if not set(self.slices) <= outputs:
            raise UsageError(f"{context}: the self-test has no output {sorted(set(self.slices) - outputs)[0]!r}")


@dataclass(frozen=True)
class VariantSpec:
    """Describe one way to run the model.

    Attributes:
        name: a name made of letters, digits and `._+-`.
        model: an ONNX file, with its external data files next to it, or a file in the format of an engine.
        ep: execution provider.
        device: "cpu", "gpu" or "npu".
        session_options: session options that the artifact needs for correct results.
        provider_options: options of `ep`. Like session options, they are limited to those in
            edgeq_device/engines/options.json. edgeq itself adds the options that refer to files of the bundle.
        info: content of executor_info.edgeq. The runner reads `architecture` ("x86_64", "arm64", "any"),
            `required_features` (a list), `rank` (an integer; the highest rank that fits wins), `min_onnxruntime`
            ("1.17"), `optimization` ("none", "basic", "extended", "all") and `threads` (the best number, which is used
            if the caller sets none). All other keys are for people.
        files: other files that the target needs (such as a file for its own runtime), by relative path. In the bundle
            they are under files/NAME. The runner on the device ignores them.
        calibration: folder with three calibration tables that contain the variant's ranges. In the bundle, the tables
            of the first variant are in calibration/, and tables that differ from these are in calibration/NAME/. `info`
            names the folder that the variant uses.
    """

    name: str
    model: Path
    ep: str = "CPUExecutionProvider"
    device: str = "cpu"
    session_options: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    selftest: SelfTestSpec = SelfTestSpec()
    files: Mapping[str, Path] = field(default_factory=dict)
    calibration: Path | None = None

    def __post_init__(self) -> None:
        context = f"variant {self.name}"
        if not is_plain_name(self.name):
            raise UsageError(f"{self.name!r} cannot name a variant", "Use letters, digits and . _ + -")
        if self.device not in DEVICES:
            raise UsageError(f"{context}: device is {self.device!r}", f"It can be {', '.join(DEVICES)}")
        # Two sources of one key could disagree.
        for key in ("selftest", "selftest_slices", "selftest_basis", "device", "calibration"):
            if key in self.info:
                raise UsageError(f"{context}: info has {key!r}, which the bundle writes itself")
        for options in (self.session_options, self.provider_options):
            if not all(isinstance(value, str) for value in options.values()):
                raise UsageError(f"{context}: session and provider options must be strings")
        self._check_options(context)
        self.selftest.check(context)

    def _check_options(self, context: str) -> None:
        """Refuse options that the bundle's reader would refuse."""
        if not is_plain_name(self.ep):
            raise UsageError(f"{context}: {self.ep!r} cannot name an execution provider")
        problems = {}
        for key, value in self.session_options.items():
            problems[f"session option {key!a}"] = session_problem(key, value, references=False)
        for key, value in self.provider_options.items():
            problems[f"provider option {key!a}"] = provider_problem(self.ep, key, value)
        for option, problem in problems.items():
            if problem:
                raise UsageError(f"{context}: {option} {problem}", "See docs/bundle.md for what a bundle may set")


@dataclass(frozen=True)
class BundleSpec:
    """Describe a whole bundle.

    Attributes:
        name: the model's name for display.
        variants: variants in order of preference. ONNX Runtime takes the first one whose execution provider fits, so
            the first variant of each architecture must be correct on every machine of that architecture. edgeq's runner
            chooses by features and rank.
        metadata: content of additional_metadata.edgeq, such as the sha256 of the source model and of the calibration
            set.
        float_model: model of the component "float32", so that one call of `bench` can run the quantized and the float
            model.
        extras: further files by plain name, such as the report and its data. They are next to the manifest, which also
            lists their hashes.
    """

    name: str
    variants: tuple[VariantSpec, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    float_model: Path | None = None
    extras: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.variants:
            raise UsageError(f"bundle {self.name} has no variant", "Name at least one target")
        # Windows and macOS do not tell names apart by case.
        folded = [variant.name.casefold() for variant in self.variants]
        for name in folded:
            if folded.count(name) > 1:
                raise UsageError(f"bundle {self.name}: two variants are named {name!r}")
        reserved = sorted(set(_RESERVED_METADATA).intersection(self.metadata))
        if reserved:
            raise UsageError(f"bundle {self.name}: metadata has {reserved[0]!r}, which the bundle writes itself")
        for name in self.extras:
            if not is_plain_name(name) or name.casefold() in _RESERVED_NAMES:
                raise UsageError(f"bundle {self.name}: {name!r} cannot name an extra file", "Choose a plain, free name")
