"""Check what a board sends after a profiled run: onnxruntime's profile, and the optimised model."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import onnx
from edgeq_device.errors import DeviceError
from edgeq_device.system.plainjson import parse_json
from google.protobuf.message import DecodeError
from msgspec import Meta

from edgeq.errors import BoardError
from edgeq.remote import link
from edgeq.remote.link import Line, Text, strip_controls
from edgeq.util.records import parse

# onnxruntime's name for the event of one run of a kernel. All other lines are skipped unparsed.
_KERNEL = b"_kernel_time"
# A longer line is read in pieces. The piece with the kernel's name is not valid JSON, so the profile is refused.
_LONGEST_LINE = 1 << 16
# Optimisation adds names and folds constants, but a graph many times as large as its source is not its result.
_GROWTH, _FIRST = 8, 1 << 20
_Typed = Mapping[Line, tuple[int, ...]]


@dataclass(frozen=True)
class _Arguments:
    op_name: Line
    input_type_shape: tuple[_Typed, ...] = ()
    output_type_shape: tuple[_Typed, ...] = ()


@dataclass(frozen=True)
class _Run:
    """Describe an event of a kernel in onnxruntime's profile. `dur` is in microseconds."""

    cat: Literal["Node"]
    name: Text
    dur: Annotated[float, Meta(ge=0, le=1e12)]
    args: _Arguments


def reduce_profile(profile: bytes) -> bytes:
    """Return the events of kernels in onnxruntime's profile, reduced to the fields that edgeq reads.

    Args:
        profile: JSON with one event on each line.

    Raises:
        ValueError: an event is not valid, or there are more events than `link.KERNELS`.
    """
    events: list[str] = []
    stream = io.BytesIO(profile)
    while line := stream.readline(_LONGEST_LINE):
        if _KERNEL not in line:
            continue
        if len(events) == link.KERNELS:
            raise ValueError(f"more than {link.KERNELS} runs of kernels")
        try:
            event = parse_json(line.strip().rstrip(b","), "a profile", values=link.KERNEL_VALUES)
            run = parse(event, _Run, "a profile", BoardError)
        except (DeviceError, BoardError) as error:
            raise ValueError(str(error)) from error
        keys = {"op_name", "input_type_shape", "output_type_shape"} & event["args"].keys()
        # Only checked fields are copied, so nothing else from the board reaches a file on this machine.
        reduced = {"cat": run.cat, "name": run.name, "dur": run.dur, "args": {key: event["args"][key] for key in keys}}
        events.append(json.dumps(strip_controls(reduced)))
    return f"[{','.join(events)}]".encode()


def check_graph(model: bytes, original: int) -> None:
    """Refuse an optimised model that is not a valid model, or that is far larger than its source.

    Args:
        original: size in bytes of the model from which it was made.

    Raises:
        ValueError: the model is refused.
    """
    if len(model) > _FIRST + _GROWTH * original:
        raise ValueError(f"an optimised model of {len(model)} bytes")
    try:
        onnx.load_model_from_string(model)
    except DecodeError as error:
        raise ValueError("the optimised model is not a model") from error
