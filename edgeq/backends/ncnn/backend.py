"""Build models for ncnn: a Q/DQ model, the file made from it, and an ONNX model that computes what ncnn computes.

The artifact is a Q/DQ model with pairs in front of the int8 layers. To open it in an engine that runs ncnn's files,
edgeq converts it with `NcnnBackend.convert`. The proof runs the emulation (`emulation`), because ncnn's kernels for
x86-64 compute other answers than those for ARM.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgeq.backends.base import Artifact, TargetBackend, check_names, refuse_wide, require_fields
from edgeq.backends.ncnn.companions import with_application_files
from edgeq.backends.ncnn.convert import lower, refusals
from edgeq.backends.ncnn.emulation import SETTINGS, emulation
from edgeq.backends.ncnn.network import NcnnNetwork
from edgeq.backends.ncnn.pairs import pair_layers
from edgeq.backends.ncnn.winograd import wrapping_layers
from edgeq.backends.ncnn.writer import SUFFIX, write_ncnn
from edgeq.calibration.ranges import Range
from edgeq.data.samples import Samples
from edgeq.errors import ModelError
from edgeq.measure.coverage import Coverage, coverage_of
from edgeq.measure.node_runs import Kind, NodeRun
from edgeq.model.int8_prediction import predict_int8
from edgeq.model.int8_rules import int8_rules
from edgeq.model.load import read_model, read_unchecked, save_model
from edgeq.model.macs import node_macs
from edgeq.model.prepare import PreparedModel
from edgeq.run.engines import EngineChoice, find_backend_engine
from edgeq.scheme import Scheme

# ncnn has no zero points, and int8 layers alone read integers.
_FIELDS: Mapping[str, Any] = {
    "mode": "static",
    "format": "QDQ",
    "activation_type": "int8",
    "activation_symmetric": True,
    "weight_type": "int8",
    "weight_symmetric": True,
    "reduce_range": False,
    "rest": "float32",
    "fit_pairs": False,
}
_NEEDS = "Leave the scheme to the target: static Q/DQ, symmetric int8 activations and weights"
_EMULATION = "emulation.onnx"


@dataclass(frozen=True)
class NcnnBackend(TargetBackend):
    """Build models for ncnn."""

    name = "ncnn"
    title = "ncnn (.param and .bin)"
    suffix = SUFFIX
    simulated = True
    runs_engines = False

    def check(self, scheme: Scheme) -> None:
        """Refuse a scheme that ncnn's kernels cannot run. See `Backend.check`."""
        refuse_wide(scheme, self.title)
        require_fields(scheme, _FIELDS, self.name, _NEEDS)

    def build(
        self,
        prepared: PreparedModel,
        ranges: Mapping[str, Range],
        scheme: Scheme,
        destination: Path,
        *,
        samples: Samples | None = None,
    ) -> Artifact:
        """Write to `destination` the Q/DQ model from which ncnn's file is made. See `Backend.build`."""
        del samples
        self.check(scheme)
        check_names(prepared, scheme.exclude)
        reasons = _float_nodes(prepared, scheme)
        names = {str(node.name) for node in prepared.model.graph} - reasons.keys()
        if not names:
            raise ModelError(f"{prepared.source}: no layer can run in int8 in ncnn", next(iter(reasons.values()), ""))
        model = prepared.model.clone()
        pair_layers(model, names, ranges, scheme, prepared.source)
        save_model(model, destination)
        # Lowered at once, only to refuse here what the conversion would refuse later.
        network = lower(model, prepared.source)
        place = Path(tempfile.mkdtemp(prefix="ncnn-", dir=prepared.path.parent))
        artifact = Artifact(
            model=destination,
            scheme=scheme,
            provider="CPUExecutionProvider",
            notes=_notes(network),
            coverage=_coverage(prepared.model, names, reasons),
            engine=EngineChoice(find_backend_engine(self.name, {})),
            simulation=place / _EMULATION,
            simulation_settings=SETTINGS,
        )
        _write_emulation(artifact)
        return artifact

    def edited(self, artifact: Artifact) -> Artifact:
        """Return an artifact whose emulation follows its edited model. See `Backend.edited`."""
        assert artifact.simulation is not None
        place = Path(tempfile.mkdtemp(prefix="ncnn-", dir=artifact.simulation.parent.parent))
        artifact = dataclasses.replace(artifact, simulation=place / _EMULATION)
        _write_emulation(artifact)
        return artifact

    def with_companions(self, artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
        """Return `artifact` with the files for a C++ or Android application. See `Backend.with_companions`."""
        return with_application_files(artifact, samples, folder, count=count)

    def write_file(self, model: Path, destination: Path) -> None:
        """Write ncnn's file of a model with Q/DQ pairs. See `Backend.write_file`."""
        self.convert(model, destination, {})

    def refusals(self, model: ir.Model, source: Path) -> Mapping[str, str]:
        """Return the nodes that ncnn's files cannot express. See `Backend.refusals`."""
        return refusals(model, source)

    def convert(self, model: Path, destination: Path, options: Mapping[str, Any]) -> None:
        """Write a model as one file for ncnn. See `Backend.convert`. The file contains all options that matter."""
        del options
        write_ncnn(read_model(model), destination, source=model)


def _write_emulation(artifact: Artifact) -> None:
    assert artifact.simulation is not None
    save_model(emulation(read_unchecked(artifact.model), artifact.model), artifact.simulation)


def _float_nodes(prepared: PreparedModel, scheme: Scheme) -> dict[str, str]:
    """Return the nodes that stay in float, each with the reason."""
    predicted = predict_int8(prepared.graph, int8_rules(NcnnBackend.name), scheme, hazards=prepared.hazards)
    return {node.name: node.reason for node in predicted if node.verdict != "int8"}


def _notes(network: NcnnNetwork) -> tuple[str, ...]:
    wrapping = wrapping_layers(network)
    notes = ["proven by an emulation of ncnn's arithmetic, with 16-bit floats off, which is not ncnn's default"]
    if wrapping:
        notes.append(
            f"Winograd F(4,3) is off, because its sums may wrap in {len(wrapping)} layers, such as {wrapping[0].node!r}"
        )
    return tuple(notes)


def _coverage(source: ir.Model, names: set[str], reasons: Mapping[str, str]) -> Coverage:
    macs = node_macs(source)

    def kind(node: ir.Node) -> Kind:
        """Return how a node counts. Everything between ncnn's layers is float, which the page says once for all."""
        return "int8" if node.name in names else "float" if macs.get(node.name or "") else "other"

    runs = [
        NodeRun(str(node.name), str(node.name), node.op_type, kind(node), macs.get(node.name or "", 0))
        for node in source.graph
    ]
    return coverage_of(
        runs, lambda run: reasons.get(run.name, ""), basis="modelled", how="the layers of the file for ncnn"
    )
