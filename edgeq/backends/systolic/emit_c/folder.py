"""Implement `edgeq emit-c`: write C code for an integer program that `quantize` or `package` wrote next to a model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from edgeq_device.system.files import open_file
from numpy.typing import NDArray

from edgeq.backends.base import Artifact
from edgeq.backends.systolic.emit_c.builder import Generation
from edgeq.backends.systolic.emit_c.bundle import CBundle, write_c_bundle
from edgeq.backends.systolic.program import Conv, Fc, Program
from edgeq.backends.systolic.save import SUFFIX, load_program
from edgeq.data.open_source import Data, sample_paths
from edgeq.data.samples import Samples, open_samples
from edgeq.errors import DataError, ModelError, UsageError
from edgeq.signature import Signature, TensorSpec
from edgeq.util.display import SILENT, Progress
from edgeq.util.marker import MARKER, as_listed, is_plain, read_marker, sha256, write_marker
from edgeq.util.outputs import check_apart, check_free, output_directory
from edgeq.util.ownership import Judge, Ownership

_KIND = "emit-c"
# Programs that the Makefile builds into the folder. They are not edgeq's files, but may be replaced with it.
_BUILT = ("net-host", "net-linux", "net-baremetal")
# The first bytes of ELF, Mach-O and Windows programs.
_EXECUTABLE = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"MZ")
MOST_WEIGHTS = 5_000_000
"""Largest number of weights of a program whose C code is part of a bundle. As text, a weight takes about four bytes."""


@dataclass(frozen=True)
class Emitted:
    """Report what `emit_c` wrote, where, and for which array and which generation of gemmini.h."""

    output: Path
    program: Program
    generation: Generation
    images: int
    bundle: CBundle

    def __record__(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "output": str(self.output),
            "files": self.bundle.files,
            "dim": self.program.array.dim,
            "generation": self.generation,
            "images": self.images,
            "layers": [layer.label for layer in self.bundle.layers],
            "inputs": [self.program.tensors[name].origin or name for name in self.bundle.inputs],
            "outputs": [self.program.tensors[name].origin or name for name in self.bundle.outputs],
            "notes": self.bundle.notes,
        }


def emit_c(
    source: Path,
    data: Data,
    output: Path,
    *,
    images: int = 2,
    generation: Generation = "2023",
    params_header: Path | None = None,
    force: bool = False,
    progress: Progress = SILENT,
) -> Emitted:
    """Write a C bundle for the program at `source`.

    Args:
        source: a .program.npz, or the int8 model next to it.
        data: samples; the first `images` of them are quantized and become the bundle's images.
        output: a new folder.

    Raises:
        UsageError: there is no program at `source`.
        EdgeqError: for the same reasons as in `load_program` and `write_c_bundle`.
    """
    place = source if source.name.endswith(SUFFIX) else source.with_name(source.stem + SUFFIX)
    if not place.is_file():
        raise UsageError(
            f"{place} does not exist",
            "Give an output of `edgeq quantize` for an array: MODEL.onnx or MODEL.program.npz",
        )
    # All checks of the paths come before the samples are read, which may take long.
    check_free(output, force=force, kind="directory")
    check_apart(output, [place, *([params_header] if params_header else []), *sample_paths((data,))])
    # Replacing a folder must not delete files that edgeq did not write.
    C_FOLDER.check(output)
    program = load_program(place)
    tensors = [program.tensors[name] for name in program.inputs]
    specs = tuple(TensorSpec(tensor.name, np.dtype(tensor.dtype), tensor.shape) for tensor in tensors)
    samples = open_samples(data, Signature(specs, ()), progress=progress)
    inputs = first_inputs(program, samples, images)
    # The command promises a number of images. A bundle, by contrast, takes as many as there are (`with_c`).
    if any(len(values) < images for values in inputs.values()):
        raise DataError(f"{data.source} has fewer than {images} samples", "Give more samples, or a smaller ⟨images⟩")
    with output_directory(output, force=force, check=C_FOLDER.check) as draft:
        bundle = write_c_bundle(program, inputs, draft, generation=generation, params_header=params_header)
        write_marker(draft, _KIND, {name: sha256(draft / name) for name in bundle.files})
    return Emitted(output, program, generation, images, bundle)


def _judge(folder: Path) -> Judge | None:
    marker = read_marker(folder, _KIND)
    files = marker.get("files") if marker is not None else None
    if not isinstance(files, dict):
        return None
    return lambda name: name == MARKER or as_listed(folder, files, name) or _is_made(folder / name, name)


def _is_made(path: Path, name: str) -> bool:
    """Return whether a file is a program that the Makefile builds."""
    if name not in _BUILT or not is_plain(path):
        return False
    with open_file(path) as stream:
        return stream.read(4).startswith(_EXECUTABLE)


C_FOLDER = Ownership("C bundle with edgeq's marker", _judge)
"""The marker lists every file with its hash. The only other files are the programs that the Makefile builds."""


def with_c(artifact: Artifact, samples: Samples, folder: Path, *, count: int) -> Artifact:
    """Return `artifact` with the C code of its integer program added to its files, as c/NAME.

    If the artifact has no program, return it unchanged. If the C code cannot be written, return it with a note.

    Args:
        folder: private folder that contains the C code until it is packed.
        count: number of `samples` that become images in the C code.
    """
    place = next((path for name, path in sorted(artifact.files.items()) if name.endswith(SUFFIX)), None)
    if place is None:
        return artifact
    program = load_program(place)
    weights = sum(step.weights.size for step in program.steps if isinstance(step, Conv | Fc))
    files: Mapping[str, Path] = {}
    notes: Sequence[str]
    # The C text of a large model would be larger than the rest of the bundle.
    if weights > MOST_WEIGHTS:
        much = f"{weights} weights are too many to include as C text"
        notes = [f"{much}; `edgeq emit-c` writes them, from {place.name}"]
    else:
        try:
            bundle = write_c_bundle(program, first_inputs(program, samples, count), folder)
            files, notes = {f"c/{name}": folder / name for name in bundle.files}, bundle.notes
        # The bundle is complete without C code, so the reason becomes a note.
        except ModelError as error:
            notes = [f"no C bundle: {error.problem}"]
    return replace(artifact, files={**artifact.files, **files}, notes=(*artifact.notes, *notes))


def first_inputs(program: Program, samples: Samples, count: int) -> Mapping[str, NDArray[Any]]:
    """Return the first `count` samples, or all if there are fewer, as arrays [N, ...] by input name."""
    batch = list(itertools.islice(samples, count))
    if not batch:
        raise DataError(f"{samples.source} holds no samples", "Give at least one")
    # One row of each sample: the program has batch 1.
    return {name: np.concatenate([np.asarray(sample.inputs[name])[:1] for sample in batch]) for name in program.inputs}
