"""Describe one way to run a model: the file, the engine, the options, and what it needs from the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional, Tuple

from edgeq_device.engines.catalog import FLOAT, EngineSpec
from edgeq_device.errors import BundleError
from edgeq_device.measure.basis import EVERYTHING, Basis
from edgeq_device.system.unchanged import HashedFolder

DRAWN = "drawn_outputs"
"""Key in a variant's info: names of the outputs that depend on random numbers. The self-test leaves them out."""
# ONNX Runtime's entry for the folder of a model's external data.
EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


@dataclass(frozen=True)
class Case:
    """Hold one self-test vector: arrays by input name and arrays by output name. Each set is an .npz or a group of an
    .npz.
    """

    inputs: Path
    outputs: Path


def name_slice(axis: int, first_index: int, last_index: int) -> str:
    """Return a name for the slice of indices `first_index` to `last_index` along `axis`."""
    indices = str(first_index) if first_index == last_index else f"{first_index}..{last_index}"
    return f"{indices} on axis {axis}"


@dataclass(frozen=True)
class SliceTolerance:
    """Set the allowed absolute difference for the indices `first` to `last` along `axis` of an output. The values there
    have a different unit from the rest.
    """

    axis: int
    first: int
    last: int
    tolerance: float

    @property
    def name(self) -> str:
        """Return the name of the slice in the output."""
        return name_slice(self.axis, self.first, self.last)


@dataclass(frozen=True)
class Variant:
    """Describe one way to run the model.

    Attributes:
        name, component: names in the package; the quantized model is the component "model".
        ep: execution provider.
        model: path of the model file; None if ONNX Runtime does not run this variant.
        session_options, provider_options: options that the session must be opened with, including those in the model's
            metadata. Paths are resolved.
        architecture: "x86_64", "arm64" ...; "any" fits all.
        required_features: CPU features without which the variant is wrong or slow.
        rank: rank of the variant. Among the variants that fit, the one with the highest rank is chosen.
        min_onnxruntime: oldest onnxruntime that runs the variant; "" if any version does.
        cases, tolerance: cases of the self-test, and the absolute tolerance of each output by name.
        slices: tolerances for parts of an output, by the output's name, in addition to its overall tolerance.
        basis: what the tolerances apply to.
        info: all of executor_info.edgeq.
        table: path of the calibration table that must be next to the engines; None if there is none.
        bundle: sha256 of the bundle's manifest, under which the device caches what it builds; "" outside a bundle.
        hashed: record of the hashed files, if the bundle is opened in place.
        old_engines: folder in which earlier versions kept engines. It is not read.
    """

    name: str
    component: str
    ep: str
    model: Optional[Path]
    session_options: Mapping[str, str]
    provider_options: Mapping[str, str]
    architecture: str
    required_features: Tuple[str, ...]
    rank: int
    min_onnxruntime: str
    cases: Tuple[Case, ...]
    tolerance: Mapping[str, float]
    info: Mapping[str, Any]
    table: Optional[Path] = None
    bundle: str = ""
    hashed: Optional[HashedFolder] = None
    old_engines: Optional[Path] = None
    slices: Mapping[str, Tuple[SliceTolerance, ...]] = field(default_factory=dict)
    basis: Basis = EVERYTHING

    def check_unchanged(self) -> None:
        """Refuse files that are opened in place and have changed since they were hashed. Call this once the files are
        open.

        Raises:
            BundleError: a file or folder has been changed, replaced or moved.
        """
        if self.hashed is not None:
            self.hashed.check()


def read_precision(variant: Variant, engine: EngineSpec) -> str:
    """Return the precision in which `variant` computes the float parts of its model.

    Raises:
        BundleError: `engine` does not have that precision.
    """
    precision = variant.info.get("precision", FLOAT)
    if not isinstance(precision, str) or precision not in engine.precisions:
        names = ", ".join(engine.precisions)
        raise BundleError(f"variant {variant.name}: precision is {precision!r}; it can be {names}")
    return precision
