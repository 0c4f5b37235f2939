"""What goes into a bundle, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.manifest import is_plain_name
from edgeq_device.options import provider_problem, session_problem
from edgeq_device.variants import SliceTolerance

from edgeq.errors import UsageError

Arrays = Mapping[str, np.ndarray[Any, Any]]

DEVICES = ("cpu", "gpu", "npu")
CALIBRATION_FILES = ("calibration.cache", "calibration.flatbuffers", "calibration.json")
_RESERVED_NAMES = frozenset(
    {
        "__main__.py",
        "calibration",
        "edgeq_device",
        "edgeq_run.py",
        "files",
        "manifest.json",
        "model.sig",
        "models",
        "sbom.cdx.json",
        "selftest",
        "shared_assets",
    }
)
_RESERVED_METADATA = ("bundle_schema", "tools", "files")


@dataclass(frozen=True)
class SelfTestCase:
    """One input and the outputs that it must give, as what `session.run` takes and returns, keyed by name."""

    inputs: Arrays
    outputs: Arrays


@dataclass(frozen=True)
class VariantSpec:
    """One way to run the model.

    Attributes:
        name: letters, digits and `._+-`.
        model: ONNX file; its external data files travel with it.
        ep, device: execution provider, and "cpu", "gpu" or "npu".
        session_options: session configuration entries that the artifact needs to be right.
        provider_options: options of `ep`. Both only as edgeq_device/options.json allows; what refers to files of the
            bundle is written by the bundle itself.
        info: becomes executor_info.edgeq. The runner reads `architecture` ("x86_64", "arm64", "any"),
            `required_features` (list), `rank` (int, the highest that fits wins), `min_onnxruntime` ("1.17") and
            `optimization` ("none", "basic", "extended", "all") and `threads` (those that suit it best, taken where the
            caller names none); the rest is for people.
        selftest: vectors; `tolerance` is the absolute difference allowed for each of their outputs, and `slices` the
            one allowed on parts of an output whose values are of another unit.
        files: what else the target needs (a file for its own runtime), by relative path; in the bundle it lies under
            files/NAME. The runner on the device ignores it.
        calibration: folder with the three calibration tables of the ranges that it uses. In the bundle the first ones
            lie in calibration/, those that differ in calibration/NAME/, and `info` says where its own are.
    """

    name: str
    model: Path
    ep: str = "CPUExecutionProvider"
    device: str = "cpu"
    session_options: Mapping[str, str] = field(default_factory=dict)
    provider_options: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    selftest: tuple[SelfTestCase, ...] = ()
    tolerance: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    calibration: Path | None = None
    slices: Mapping[str, tuple[SliceTolerance, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"variant {self.name}"
        if not is_plain_name(self.name):
            raise UsageError(f"{self.name!r} cannot name a variant", "Use letters, digits and . _ + -")
        if self.device not in DEVICES:
            raise UsageError(f"{where}: device is {self.device!r}", f"It can be {', '.join(DEVICES)}")
        for key in ("selftest", "selftest_slices", "device", "calibration"):
            if key in self.info:
                raise UsageError(f"{where}: info holds {key!r}, which the bundle writes itself")
        for options in (self.session_options, self.provider_options):
            if not all(isinstance(value, str) for value in options.values()):
                raise UsageError(f"{where}: session and provider options must be strings")
        self._check_options(where)
        outputs = {name for case in self.selftest for name in case.outputs}
        if outputs != set(self.tolerance):
            odd = sorted(outputs ^ set(self.tolerance))
            raise UsageError(f"{where}: self-test outputs and tolerances differ in {odd[0]!r}")
        if not set(self.slices) <= outputs:
            raise UsageError(f"{where}: the self-test has no output {sorted(set(self.slices) - outputs)[0]!r}")

    def _check_options(self, where: str) -> None:
        """Refuse what the reader of the bundle would refuse."""
        if not is_plain_name(self.ep):
            raise UsageError(f"{where}: {self.ep!r} cannot name an execution provider")
        problems = {}
        for key, value in self.session_options.items():
            problems[f"session option {key!a}"] = session_problem(key, value, references=False)
        for key, value in self.provider_options.items():
            problems[f"provider option {key!a}"] = provider_problem(self.ep, key, value)
        for option, problem in problems.items():
            if problem:
                raise UsageError(f"{where}: {option} {problem}", "See docs/bundle.md for what a bundle may set")


@dataclass(frozen=True)
class BundleSpec:
    """A whole bundle.

    Attributes:
        name: what people call the model.
        variants: in order of preference. ONNX Runtime takes the first whose execution provider fits, so the first of
            each architecture must be right on every machine of it; edgeq's runner goes by features and rank.
        metadata: becomes additional_metadata.edgeq: sha256 of the source model and of the calibration set, ...
        float_model: becomes the component "float32", so that `bench` can run both in one go.
        extras: further files, by plain name, that stand beside the manifest and are hashed like all others: the report
            and what it was made of.
    """

    name: str
    variants: tuple[VariantSpec, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    float_model: Path | None = None
    extras: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.variants:
            raise UsageError(f"bundle {self.name}: no variant", "Name at least one target")
        folded = [variant.name.casefold() for variant in self.variants]
        for name in folded:
            if folded.count(name) > 1:
                raise UsageError(f"bundle {self.name}: two variants are named {name!r}")
        reserved = sorted(set(_RESERVED_METADATA).intersection(self.metadata))
        if reserved:
            raise UsageError(f"bundle {self.name}: metadata holds {reserved[0]!r}, which the bundle writes itself")
        for name in self.extras:
            if not is_plain_name(name) or name.casefold() in _RESERVED_NAMES:
                raise UsageError(f"bundle {self.name}: {name!r} cannot name an extra file", "Choose a plain, free name")
