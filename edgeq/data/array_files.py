"""Read .npy, .npz and IDX files. These files contain prepared model inputs, raw items, or image files inside arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeq.data.arrays import ArrayFile, Header, Slices, load_labels, read_arrays, read_tensor
from edgeq.data.files import decode_bytes
from edgeq.data.input_names import LABEL_KEYS, choose_input, match_names
from edgeq.data.limits import check_size
from edgeq.data.records import Hash, Record, Rows, describe_file, split_indices, update_with_file
from edgeq.data.source_options import SourceOptions
from edgeq.data.split import SplitPlan, plan_prepared
from edgeq.errors import DataError
from edgeq.signature import Signature

# One note per file would flood the screen for a folder of thousands of files.
_MOST_NOTES = 3


@dataclass(frozen=True)
class ArrayFormat:
    """Describe a file and how edgeq reads it.

    Attributes:
        arrays: model input → key in the file.
        shapes: model input → the shape to which its array is reshaped before slicing.
        plan: the way in which slices become records.
        label: the key of the labels.
        offsets: the key of the offsets, if the array contains concatenated image files.
    """

    path: Path
    arrays: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    plan: SplitPlan
    label: str | None = None
    offsets: str | None = None


@dataclass(frozen=True)
class ArrayFiles:
    """Read the records of a list of array files, in order.

    Attributes:
        classes: class sub-folder → label, for files that contain no labels; may be empty.
    """

    root: Path
    entries: tuple[ArrayFormat, ...]
    prepared: bool
    classes: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> Rows:
        """Return "one" if every record is one row of the batch, "exact" if every record is a complete batch, or
        "unknown" if the files differ.
        """
        if all(entry.plan.one_row for entry in self.entries):
            return "one"
        return "unknown" if any(entry.plan.one_row for entry in self.entries) else "exact"

    def __len__(self) -> int:
        return sum(entry.plan.count for entry in self.entries)

    def groups(self) -> Sequence[str]:
        """Return each record's class folder, or an empty sequence if there are no class folders."""
        if not self.classes:
            return ()
        return [entry.path.relative_to(self.root).parts[0] for entry in self.entries for _ in range(entry.plan.count)]

    def read_records(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield the records at `indices`. Only one slice of one file is in memory at a time."""
        for number, local in split_indices([entry.plan.count for entry in self.entries], indices):
            entry = self.entries[number]
            # Labels inside a file take precedence over the name of its folder.
            context, label = describe_file(entry.path, self.root, {} if entry.label is not None else self.classes)
            for record in _read_entry(entry, local):
                record_label = label if entry.label is None else record.label
                yield replace(record, label=record_label, context={**context, **record.context})

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """For each file that contains records at `indices`, hash the file's name, its bytes and the range of those
        records.
        """
        for number, local in split_indices([entry.plan.count for entry in self.entries], indices):
            path = self.entries[number].path
            update_with_file(digest, path, path.relative_to(self.root).as_posix())
            # Two selections of one file have the same bytes, so the indices are part of the digest.
            digest.update(repr(local).encode())


def open_array_files(
    root: Path,
    files: tuple[Path, ...],
    signature: Signature,
    options: SourceOptions,
    *,
    prepared: bool,
    classes: Mapping[str, int] | None = None,
    notes: tuple[str, ...] = (),
) -> ArrayFiles:
    """Read the headers of all the files and decide how to slice each file.

    Args:
        prepared: whether the arrays are already model inputs.
        classes, notes: values for these fields of the returned reader.

    Raises:
        DataError: a file is damaged, or does not fit the model or the options.
    """
    entries = []
    for path in files:
        headers = read_arrays(path)
        # Only headers are read here. Opening a data set of any size takes the same time per file.
        choose_format = _describe_prepared if prepared else _describe_raw
        entry = choose_format(path, headers, signature, options)
        entries.append(entry)
        label_keys = [key for key in LABEL_KEYS if key in headers and key not in (entry.label, *entry.arrays.values())]
        if label_keys and entry.label is None and options.label is None and len(notes) < _MOST_NOTES:
            shape = list(headers[label_keys[0]].shape)
            notes = (
                *notes,
                f"{path}: {label_keys[0]!r} of shape {shape} does not have one label per sample and is left out",
            )
    return ArrayFiles(root, tuple(entries), prepared, classes or {}, notes)


def holds_key(path: Path, options: SourceOptions) -> bool:
    """Return whether a file contains the array that the options name."""
    headers = read_arrays(path)
    return any(key is not None and key in headers for key in (options.key, options.encoded))


def find_image_arrays(headers: Mapping[str, Header]) -> tuple[str, str | None] | None:
    """Return the key of the images and the key of their labels, which is None if there are no labels. If the file does
    not contain images, return None instead of the two keys.

    A file with images contains one uint8 array of three or four axes, and the last axis is for colours. The only other
    array that it may contain is an array of labels with one number per image.
    """
    images = [key for key, array in headers.items() if array.dtype == np.uint8 and len(array.shape) in (3, 4)]
    other_keys = [key for key in headers if key not in images]
    # A second byte array could be masks or depth. Then the user must name the images.
    if len(images) != 1 or headers[images[0]].shape[-1] not in (1, 3) or len(other_keys) > 1:
        return None
    shape = headers[images[0]].shape
    count = shape[0] if len(shape) == 4 else 1
    numbers = [key for key in other_keys if headers[key].dtype.kind in "iu" and math.prod(headers[key].shape) == count]
    # The other array is not one number per image, so the file is not a plain set of labelled images.
    if len(numbers) < len(other_keys):
        return None
    return images[0], numbers[0] if numbers else None


def _describe_prepared(
    path: Path, headers: Mapping[str, Header], signature: Signature, options: SourceOptions
) -> ArrayFormat:
    arrays = match_names([key for key in headers if key != options.label], signature, str(path))
    shapes = {name: headers[key].shape for name, key in arrays.items()}
    plan = plan_prepared(shapes, signature, str(path), options.stack)
    return ArrayFormat(path, arrays, shapes, plan, _label_key(headers, arrays, options))


def _label_key(headers: Mapping[str, Header], arrays: Mapping[str, str], options: SourceOptions) -> str | None:
    """Return the key of the labels, or None if the file has no labels. An option may name labels that the file lacks,
    because files without labels (calibration data) are read with the same options.
    """
    if options.label is not None:
        return options.label if options.label in headers and options.label not in arrays.values() else None
    images = find_image_arrays(headers)
    if images is not None and images[1] is not None and images[0] in arrays.values():
        return images[1]
    candidates = (key for key in LABEL_KEYS if key in headers and key not in arrays.values())
    # An array with this name may contain something else, such as the boxes in each image.
    return next(
        (key for key in candidates if math.prod(headers[key].shape) == max(headers[key].shape, default=0)), None
    )


def _describe_raw(
    path: Path, headers: Mapping[str, Header], signature: Signature, options: SourceOptions
) -> ArrayFormat:
    if options.encoded is not None and options.encoded in headers:
        return _describe_encoded(path, headers, signature, options)
    arrays = _match_raw_names(path, headers, signature, options)
    label = _label_key(headers, arrays, options)
    counts = set()
    shapes = {}
    for name, key in arrays.items():
        shape = headers[key].shape
        if 0 in shape:
            raise DataError(f"{path} holds an empty array", "Leave the file out")
        if not shape:  # one value that all samples share
            shapes[name] = shape
            continue
        # Without a layout, the first axis counts the items, except in a file of images, which may contain one image.
        colours = 3 if find_image_arrays(headers) is not None else len(shape) - 1
        rank = len(options.layout) if options.layout is not None else colours
        if len(shape) < rank:
            raise DataError(
                f"{path}: {key or 'the array'} has shape {list(shape)}, fewer axes than the layout {options.layout}",
                "Correct source.layout",
            )
        split = len(shape) - rank
        # All leading axes count items, so they are joined to one.
        shapes[name] = (math.prod(shape[:split]), *shape[split:])
        counts.add(shapes[name][0])
    if not counts:
        raise DataError(f"{path} contains one number, not samples", "Store items along the first axis")
    if len(counts) != 1:
        raise DataError(
            f"{path}: the arrays hold {sorted(counts)} samples",
            "Store the same number of each. If they are model inputs already, leave ⟨preprocess⟩ out",
        )
    return ArrayFormat(path, arrays, shapes, SplitPlan("items", counts.pop(), True), label)


def _match_raw_names(
    path: Path, headers: Mapping[str, Header], signature: Signature, options: SourceOptions
) -> Mapping[str, str]:
    target = choose_input(signature, options.input)
    if list(headers) == [""]:
        return {target: ""}
    if options.key is not None:
        if options.key not in headers:
            raise DataError(f"{path} holds no array {options.key!r}", f"It holds {', '.join(headers)}; correct the key")
        return {target: options.key}
    inputs = {spec.name for spec in signature.inputs}
    # Images are found by their type, so the arrays need no names of their own.
    if options.label is None and (images := find_image_arrays(headers)) is not None and target:
        return {target: images[0]}
    labels = {options.label} if options.label is not None else set(LABEL_KEYS) - inputs
    items = [key for key in headers if key not in labels]
    if len(items) == 1 and items[0] not in inputs:
        return {target: items[0]}
    return match_names(items, signature, str(path))


def _describe_encoded(
    path: Path, headers: Mapping[str, Header], signature: Signature, options: SourceOptions
) -> ArrayFormat:
    assert options.encoded is not None
    assert options.offsets is not None
    images, offsets = headers[options.encoded], headers.get(options.offsets)
    # n images need n + 1 positions, because the last one ends the last image.
    if offsets is None or len(offsets.shape) != 1 or offsets.dtype.kind not in "iu" or offsets.shape[0] < 2:
        raise DataError(f"{path} has no offsets {options.offsets!r} of whole numbers", "Store n + 1 of them")
    if images.dtype != np.uint8 or len(images.shape) != 1:
        raise DataError(f"{path}[{options.encoded}] is not bytes", "Store the image files end to end as uint8")
    target = choose_input(signature, options.input)
    plan = SplitPlan("items", offsets.shape[0] - 1, True)
    arrays = {target: options.encoded}
    label = _label_key(headers, arrays, options)
    return ArrayFormat(path, arrays, {target: images.shape}, plan, label, options.offsets)


def _read_entry(entry: ArrayFormat, local: Sequence[int]) -> Iterator[Record]:
    with ArrayFile(entry.path) as file:
        labels: list[Any] | None = None
        if entry.label is not None:
            labels = load_labels(file, entry.label)
            if len(labels) != entry.plan.count:
                raise DataError(
                    f"{entry.path} holds {entry.plan.count} samples and {len(labels)} labels ({entry.label})",
                    "Store one label per sample",
                )
        if entry.offsets is not None:
            records = _read_encoded(file, entry, local)
        else:
            slices = {name: file.slices(key, entry.shapes[name]) for name, key in entry.arrays.items()}
            # A number without axes belongs to every sample, so it is read whole each time.
            plans = {name: entry.plan if shape else SplitPlan("whole", 1, True) for name, shape in entry.shapes.items()}
            records = ((i, {name: _take(s, plans[name], i) for name, s in slices.items()}) for i in local)
        for index, raw in records:
            name = f"{entry.path}[{index}]" if entry.plan.count > 1 else str(entry.path)
            yield Record(name, raw, labels[index] if labels else None, {"index": index})


def _take(slices: Slices, plan: SplitPlan, index: int) -> Any:
    if plan.kind in ("whole", "single"):
        return slices.load_all()
    return slices.take(index)[None] if plan.kind == "rows" else slices.take(index)


def _read_encoded(file: ArrayFile, entry: ArrayFormat, local: Sequence[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    assert entry.offsets is not None
    offsets = file.load(entry.offsets)
    # Going back in a compressed array means decompressing it again from its beginning.
    if (offsets[1:] < offsets[:-1]).any():
        raise DataError(f"{entry.path}: the offsets {entry.offsets!r} do not increase", "Correct the offsets")
    ((name, key),) = entry.arrays.items()
    total = file.headers[key].shape[0]
    for index in local:
        start, stop = int(offsets[index]), int(offsets[index + 1])
        location = f"{entry.path}[{index}]"
        # Offsets are untrusted: a negative or huge one would read outside the array.
        if not 0 <= start < stop <= total:
            raise DataError(f"{location}: offsets {start}..{stop} of {total} bytes", "Correct the offsets")
        check_size(stop - start, f"{location} must be read as a whole", "Correct the offsets")
        yield index, {name: decode_bytes(file.read_bytes(key, start, stop), location)}


CASE = re.compile(r"test_data_set_(\d+)")
INPUT = re.compile(r"input_(\d+)\.pb")


@dataclass(frozen=True)
class Cases:
    """Read folders that contain input_0.pb, input_1.pb and so on. Each folder is one record."""

    root: Path
    cases: tuple[tuple[Path, ...], ...]
    signature: Signature
    prepared: bool
    notes: tuple[str, ...] = ()
    rows: Rows = "unknown"  # a test case is one complete sample, and its batch size does not matter

    def __len__(self) -> int:
        return len(self.cases)

    def read_records(self, indices: Sequence[int]) -> Iterator[Record]:
        """Yield the tensors of each test case, keyed by input name."""
        inputs = [spec.name for spec in self.signature.inputs]
        for index in indices:
            files = self.cases[index]
            tensors = [read_tensor(path) for path in files]
            # Some exporters store tensors without the names of the inputs. Then the number in the file's name decides.
            named = sorted(name for name, _ in tensors) == sorted(inputs)
            raw = {name if named else inputs[i]: array for i, (name, array) in enumerate(tensors)}
            folder = files[0].parent
            yield Record(str(folder), raw, None, {"file": folder.name})

    def update(self, digest: Hash, indices: Sequence[int]) -> None:
        """Hash the path and bytes of every file of the test cases."""
        for index in indices:
            for path in self.cases[index]:
                update_with_file(digest, path, path.relative_to(self.root).as_posix())


def find_cases(root: Path) -> tuple[Path, ...]:
    """Return the folders of test cases. If `root` contains input_0.pb, the result is only `root`. Otherwise, it is the
    test_data_set_N folders in `root`, in the order of N.
    """
    if (root / "input_0.pb").is_file():
        return (root,)
    numbered_folders = [
        (int(match[1]), path) for path in root.iterdir() if (match := CASE.fullmatch(path.name)) and path.is_dir()
    ]
    # Sorting by number puts test_data_set_10 after test_data_set_9.
    return tuple(path for _, path in sorted(numbered_folders))


def open_cases(root: Path, folders: tuple[Path, ...], signature: Signature, *, prepared: bool) -> Cases:
    """Check that every test case has a file input_M.pb for each model input (M is the input's index), and return the
    reader.
    """
    count = len(signature.inputs)
    cases = []
    for folder in folders:
        numbers = sorted(int(match[1]) for path in folder.iterdir() if (match := INPUT.fullmatch(path.name)))
        if numbers != list(range(count)):
            raise DataError(
                f"{folder} holds {len(numbers)} inputs ({', '.join(f'input_{n}.pb' for n in numbers) or 'none'}), "
                f"the model takes {count} ({', '.join(spec.name for spec in signature.inputs)})",
                "Store input_0.pb" + (f" to input_{count - 1}.pb" if count > 1 else ""),
            )
        cases.append(tuple(folder / f"input_{number}.pb" for number in numbers))
    return Cases(root, tuple(cases), signature, prepared)


def open_stacked(
    path: Path, signature: Signature, layout: str | None, stack: bool | None, *, prepared: bool
) -> ArrayFiles:
    """Open one TensorProto file that contains many samples of a one-input model, and decide how it splits into samples.

    Prepared data is split as in `plan_prepared`. Raw data is split by the axes of `layout`. A flat array that contains
    exactly one sample's values is also accepted, because older tools wrote such files.
    """
    if len(signature.inputs) != 1:
        raise DataError(
            f"{path} is one tensor, the model takes {len(signature.inputs)} inputs", "Store cases in folders"
        )
    spec = signature.inputs[0]
    shape = read_arrays(path)[""].shape
    if not prepared and layout is not None:
        split = max(0, len(shape) - len(layout))
        if 0 in shape and split:
            raise DataError(f"{path} holds no samples", "Leave the file out")
        plan = SplitPlan("items", math.prod(shape[:split]), True) if split else SplitPlan("whole", 1, True)
        shape = (plan.count, *shape[split:]) if split else shape
    else:
        # Older tools wrote a sample as one row of numbers, without its shape.
        if len(shape) == 1 and spec.shape is not None and len(spec.shape) > 1:
            sizes: list[Any] = [1 if axis == 0 and not isinstance(n, int) else n for axis, n in enumerate(spec.shape)]
            shape = tuple(sizes) if all(isinstance(n, int) for n in sizes) and math.prod(sizes) == shape[0] else shape
        plan = plan_prepared({spec.name: shape}, signature, str(path), stack)
    return ArrayFiles(path.parent, (ArrayFormat(path, {spec.name: ""}, {spec.name: shape}, plan),), prepared)
