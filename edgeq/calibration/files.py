"""Save statistics as a directory: `statistics.json` describes them, `statistics.npz` contains the numbers. Pickle is
not used.

The same statistics always give the same bytes: names are sorted, and the archive contains no timestamps. All arrays
have one dimension, and tensors are in the order of the JSON file:

- minimum, maximum: float32[tensors];
- bins: int64[tensors], the number of bins of each tensor;
- steps: uint32[all bins]; for each tensor, the order number of its first key (plus an offset that makes it positive),
  then the differences between neighbouring keys;
- counts: uint64[all bins];
- channels: int64[tensors], the number of channel extrema of each tensor;
- channel_minimum, channel_maximum: float32[all channels].
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from edgeq_device.prepare.npz import write_npz
from edgeq_device.system.budget import read_largest_sample
from edgeq_device.system.files import open_file, read_file
from numpy.typing import NDArray

from edgeq.calibration.statistics import (
    FINITE,
    KEYS,
    ChannelExtrema,
    Histogram,
    Nonfinite,
    Statistics,
    TensorStatistics,
    from_order,
    is_sound,
    order_of,
)
from edgeq.data.arrays import DAMAGE, read_npy_header
from edgeq.errors import CalibrationError, OutputError, one_line
from edgeq.util.marker import is_plain, read_object
from edgeq.util.outputs import check_free, output_directory
from edgeq.util.ownership import Judge, Ownership
from edgeq.util.record_files import is_longer
from edgeq.util.records import Count, parse, plain

JSON, ARRAYS = "statistics.json", "statistics.npz"
FORMAT: Final = "edgeq-statistics"
VERSION = 1
MAX_BYTES = 2**31
"""Largest permitted size of the unpacked arrays, in bytes."""
MAX_JSON_BYTES = 2**26
_LEVEL = 1  # compression level: the fastest
_TYPES = {
    "minimum": np.float32,
    "maximum": np.float32,
    "bins": np.int64,
    "steps": np.uint32,
    "counts": np.uint64,
    "channels": np.int64,
    "channel_minimum": np.float32,
    "channel_maximum": np.float32,
}


def check_directory(directory: Path, *, force: bool) -> None:
    """Check an output directory before any work begins. Refuse it if it cannot be written or contains anything but
    statistics.

    Raises:
        OutputError: the directory is refused. With `force`, edgeq refuses it only if replacing it would delete other
            files.
    """
    check_free(directory, force=force, kind="directory")
    STATISTICS.check(directory)


def check_regular(directory: Path) -> None:
    """Refuse statistics whose files are links, pipes or devices. The check comes before any file is opened.

    Raises:
        OutputError: a file is not a regular file.
    """
    # A link could lead the writer or a reader to any file of the user.
    for place in (directory / JSON, directory / ARRAYS):
        if os.path.lexists(place) and not is_plain(place):
            raise OutputError(f"{place} is a link or not a regular file", "Move it, or choose another output")


def save_statistics(statistics: Statistics, directory: Path, *, force: bool = False) -> None:
    """Write statistics into a new directory, completely or not at all. With `force`, the directory replaces earlier
    statistics.
    """
    with output_directory(directory, force=force, check=STATISTICS.check) as draft:
        described = plain(_described(statistics))
        (draft / JSON).write_text(json.dumps(described, indent=1, ensure_ascii=False) + "\n", "utf-8")
        write_npz(draft / ARRAYS, _arrays(statistics), level=_LEVEL)


def _judge(directory: Path) -> Judge | None:
    described = read_object(directory / JSON)
    # Another program's statistics.json must not be replaced.
    if described is None or described.get("format") != FORMAT:
        return None
    return lambda name: name == JSON or (name == ARRAYS and _are_arrays(directory / name))


def _are_arrays(path: Path) -> bool:
    try:
        with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
            return sorted(archive.namelist()) == sorted(f"{name}.npy" for name in _TYPES)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError):
        return False


STATISTICS = Ownership("calibration", _judge)
"""Recognises a directory whose description and arrays have edgeq's form, and which contains nothing else."""


def load_statistics(directory: Path) -> Statistics:
    """Read statistics, and check that the numbers are plausible.

    Raises:
        CalibrationError: the directory contains no statistics, is damaged, or was written by a later version.
    """
    try:
        described = _description(directory / JSON)
        arrays = _read_arrays(directory / ARRAYS)
        return _statistics(described, arrays)
    except OSError as error:
        raise CalibrationError(
            f"{directory} contains no calibration statistics ({error.strerror}: {Path(str(error.filename)).name})",
            "Give a directory that `edgeq calibrate` wrote",
        ) from error
    except CalibrationError as error:
        raise CalibrationError(f"{directory} is damaged ({error.text})", "Calibrate again") from error
    except (*DAMAGE, KeyError, IndexError, OverflowError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", most=200)
        raise CalibrationError(f"{directory} is damaged ({reason})", "Calibrate again") from error


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: str
    samples: Count
    nonempty: Count
    count: Count
    # A JSON number cannot reliably represent such large integers.
    minimum_sum: str
    maximum_sum: str
    channel_axis: Count | None


@dataclass(frozen=True)
class _Description:
    format: Literal["edgeq-statistics"]
    version: int
    model: str
    data: str
    samples: Count
    total: Count
    tensors: tuple[_Tensor, ...]
    # Only tensors with NaN or infinite elements are listed. Earlier releases ignore this key.
    nonfinite: Mapping[str, Nonfinite] = field(default_factory=dict)


def _described(statistics: Statistics) -> _Description:
    tensors = tuple(
        _Tensor(
            name,
            tensor.dtype,
            tensor.samples,
            tensor.nonempty,
            tensor.count,
            str(tensor.minimum_sum),
            str(tensor.maximum_sum),
            None if tensor.channels is None else tensor.channels.axis,
        )
        for name, tensor in statistics.tensors.items()
    )
    digests = statistics.model_digest, statistics.data_digest
    nonfinite = {n: t.nonfinite for n, t in statistics.tensors.items() if t.nonfinite}
    return _Description(FORMAT, VERSION, *digests, statistics.samples, statistics.total, tensors, nonfinite)


def _arrays(statistics: Statistics) -> dict[str, NDArray[Any]]:
    tensors = list(statistics.tensors.values())
    histograms = [t.histogram for t in tensors]
    channels = [t.channels for t in tensors]
    present = [c for c in channels if c is not None]
    arrays: dict[str, list[Any]] = {
        "minimum": [t.minimum for t in tensors],
        "maximum": [t.maximum for t in tensors],
        "bins": [h.keys.size for h in histograms],
        "steps": [np.diff(order_of(h.keys).astype(np.int64), prepend=-KEYS) for h in histograms],
        "counts": [h.counts for h in histograms],
        "channels": [0 if c is None else c.minimum.size for c in channels],
        "channel_minimum": [c.minimum for c in present],
        "channel_maximum": [c.maximum for c in present],
    }
    scalars = ("minimum", "maximum", "bins", "channels")
    return {
        name: np.array(parts, _TYPES[name])
        if name in scalars
        else np.concatenate([np.zeros(0, _TYPES[name]), *(np.asarray(p).astype(_TYPES[name]) for p in parts)])
        for name, parts in arrays.items()
    }


def _statistics(described: _Description, arrays: Mapping[str, NDArray[Any]]) -> Statistics:
    entries = described.tensors
    for name in ("minimum", "maximum", "bins", "channels"):
        if arrays[name].size != len(entries):
            raise ValueError(f"{name} has {arrays[name].size} entries for {len(entries)} tensors")
    splits = {
        name: _split(arrays[name], arrays[sizes])
        for name, sizes in (
            ("steps", "bins"),
            ("counts", "bins"),
            ("channel_minimum", "channels"),
            ("channel_maximum", "channels"),
        )
    }
    tensors = {}
    for i, entry in enumerate(entries):
        keys = from_order((np.cumsum(splits["steps"][i], dtype=np.int64) - KEYS).astype(np.int32))
        histogram = Histogram(keys, splits["counts"][i].astype(np.int64))
        axis = entry.channel_axis
        tensor = TensorStatistics(
            entry.dtype,
            entry.samples,
            entry.nonempty,
            entry.count,
            float(arrays["minimum"][i]),
            float(arrays["maximum"][i]),
            int(entry.minimum_sum),
            int(entry.maximum_sum),
            histogram,
            None if axis is None else ChannelExtrema(axis, splits["channel_minimum"][i], splits["channel_maximum"][i]),
            described.nonfinite.get(entry.name, FINITE),
        )
        # Numbers that contradict each other would give ranges that no value explains.
        if not is_sound(histogram) or bool(histogram.total) != bool(tensor.count) or entry.name in tensors:
            raise ValueError(f"tensor {entry.name!r} has contradictory numbers")
        if tensor.count and not -np.inf < tensor.minimum <= tensor.maximum < np.inf:
            raise ValueError(f"tensor {entry.name!r} has the extrema {tensor.minimum}..{tensor.maximum}")
        tensors[entry.name] = tensor
    return Statistics(described.model, described.data, described.samples, tensors, described.total)


def _split(values: NDArray[Any], sizes: NDArray[np.int64]) -> list[NDArray[Any]]:
    if (sizes < 0).any() or int(sizes.sum()) != values.size:
        raise ValueError("the sizes of an array's parts do not add up to its size")
    return np.split(values, np.cumsum(sizes)[:-1]) if sizes.size else []


def _description(path: Path) -> _Description:
    if is_longer(path, MAX_JSON_BYTES):
        raise ValueError(f"{path.name} is too large")
    described = json.loads(read_file(path).decode("utf-8"))
    version = described.get("version", VERSION) if isinstance(described, dict) else VERSION
    if version != VERSION:
        raise ValueError(f"{path.name} has version {version}, this edgeq reads version {VERSION}")
    return parse(described, _Description, path.name, CalibrationError)


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    arrays = {}
    with open_file(path) as stream, zipfile.ZipFile(stream) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        # Half of the budget's `sample`, because the running sums of the unpacked numbers need twice as many bytes.
        if size > min(MAX_BYTES, 16 * path.stat().st_size + read_largest_sample() // 2):
            raise ValueError(f"{path.name} unpacks to {size} bytes")
        for name, kind in _TYPES.items():
            # `read` returns at most the unpacked size that the archive's directory states.
            arrays[name] = _parse_array(archive.read(f"{name}.npy"), np.dtype(kind))
    return arrays


def _parse_array(content: bytes, kind: np.dtype[Any]) -> NDArray[Any]:
    """Parse one .npy file without trusting the shape in its header. numpy would allocate memory for that shape before
    it reads the data.
    """
    stream = io.BytesIO(content)
    header = read_npy_header(stream)
    if header.dtype != kind or len(header.shape) != 1:
        raise ValueError(f"an array is {header.dtype} with {len(header.shape)} dimensions")
    array = np.frombuffer(content, kind, offset=header.start)
    if array.size != header.shape[0]:
        raise ValueError(f"an array of {header.shape[0]} entries has {array.size}")
    return array
