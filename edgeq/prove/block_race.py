"""Compare the speed of int8 and float compute for matrix products with 4-bit weights on this machine.

The int8 kernels are faster for few rows, and the float kernels are faster for many rows. The number of rows at which
this changes depends on the machine and the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
from edgeq_device.measure.claim import SLOWER, UNKNOWN, make_claim

from edgeq.backends.base import with_compute
from edgeq.data.samples import Samples, spread_over
from edgeq.measure.race import make_runners, race
from edgeq.measure.timed_model import count_sessions
from edgeq.model.load import read_model, save_model
from edgeq.prove.job import Built, Job
from edgeq.quantization.block_compute import DETAIL, BlockCompute, kinds_of
from edgeq.quantization.block_products import set_compute
from edgeq.run.session import Engines
from edgeq.scheme import ALL_NODES

# _SEEN: number of samples whose sizes are read. _RACED: number of these samples that are timed, from the smallest to
# the largest.
_SEEN, _RACED = 64, 4


_INT8, _FLOAT = "int8", "float32"


def must_race(compute: BlockCompute | None) -> bool:
    """Return whether an artifact has matrix products with 4-bit weights that are computed in int8."""
    return compute is not None and any(kind.bits < 8 and kind.compute == _INT8 for kind in compute.kinds)


def race_compute(job: Job, built: Built) -> Built:
    """Time both kinds of compute against each other. If float is certainly not slower here, switch the artifact's 4-bit
    products to float compute, in place. Otherwise, leave them in int8. In both cases, add the measurement to the
    artifact and return it.

    Args:
        built: an artifact for this machine that runs on onnxruntime's own kernels.

    Raises:
        DataError: ONNX Runtime does not accept a sample.
    """
    artifact = built.artifact
    compute: BlockCompute = artifact.details[DETAIL]
    model = read_model(artifact.model)
    ir.external_data.load_to_model(model)  # the saved file may replace the file from which the weights were read
    in_float = tuple(sorted({*compute.float_compute, ALL_NODES}))
    set_compute(model, in_float)
    float_path = job.folder / "float-compute.onnx"
    save_model(model, float_path)
    feeds = raced_feeds(job.calibration or job.validation)
    count = count_sessions(job.prepared.path)
    with Engines() as engines, job.progress.stage("Racing int8 against float compute") as advance:
        sessions = {
            name: engines.open_apart(file, artifact.settings(), count)
            for name, file in {_INT8: artifact.model, _FLOAT: float_path}.items()
        }
        latency = race(make_runners(sessions, feeds), lambda: advance(0))
    speedup = make_claim(latency[_INT8], latency[_FLOAT])
    measured = speedup.sentence("float compute", _INT8)
    compute = replace(compute, race=speedup)
    if speedup.verdict in (SLOWER, UNKNOWN):
        return replace(built, artifact=with_compute(artifact, replace(compute, why=f"{compute.why}; {measured}")))
    save_model(model, artifact.model)
    why = f"float, which is more accurate: {measured}"
    kinds = kinds_of(model, compute.noise)
    faster = replace(compute, float_compute=in_float, why=why, kinds=kinds)
    return replace(built, artifact=with_compute(artifact, faster))


def raced_feeds(samples: Samples) -> list[Mapping[str, Any]]:
    """Return the inputs of a few samples that represent the sizes of all samples."""
    feeds = [sample.inputs for sample in spread_over(samples, _SEEN)]
    by_size = sorted(feeds, key=lambda inputs: sum(array.size for array in inputs.values()))
    shapes = {tuple((name, array.shape) for name, array in sorted(inputs.items())) for inputs in by_size}
    count = min(_RACED, len(shapes))
    return [by_size[(2 * i + 1) * len(by_size) // (2 * count)] for i in range(count)]
