"""Check a profile that a board sends: the runs of kernels alone, and a graph that can be read."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import onnx
from edgeq_device.errors import DeviceError
from edgeq_device.plainjson import parse_json
from google.protobuf.message import DecodeError
from msgspec import Meta

from edgeq.errors import BoardError
from edgeq.records import parse
from edgeq.remote import bounds
from edgeq.remote.bounds import Line, Text
from edgeq.remote.channel import without_controls

_KERNEL = b"_kernel_time"
_LONGEST_LINE = 1 << 16
_GROWTH, _FIRST = 8, 1 << 20
_Typed = Mapping[Line, tuple[int, ...]]


@dataclass(frozen=True)
class _Arguments:
    op_name: Line
    input_type_shape: tuple[_Typed, ...] = ()
    output_type_shape: tuple[_Typed, ...] = ()


@dataclass(frozen=True)
class _Run:
    """An event of onnxruntime's profile that is a kernel's; `dur`: microseconds."""

    cat: Literal["Node"]
    name: Text
    dur: Annotated[float, Meta(ge=0, le=1e12)]
    args: _Arguments


def kernel_events(profile: bytes) -> bytes:
    """Return the events of kernels in onnxruntime's profile, which has one a line, and of them what edgeq reads.

    Raises:
        ValueError: one is not as it should be, or there are more than `bounds.KERNELS`.
    """
    kept: list[str] = []
    stream = io.BytesIO(profile)
    while line := stream.readline(_LONGEST_LINE):
        if _KERNEL not in line:
            continue
        if len(kept) == bounds.KERNELS:
            raise ValueError(f"more than {bounds.KERNELS} runs of kernels")
        try:
            event = parse_json(line.strip().rstrip(b","), "a profile", values=bounds.KERNEL_VALUES)
            run = parse(event, _Run, "a profile", BoardError)
        except (DeviceError, BoardError) as error:
            raise ValueError(str(error)) from error
        read = {"op_name", "input_type_shape", "output_type_shape"} & event["args"].keys()
        known = {"cat": run.cat, "name": run.name, "dur": run.dur, "args": {key: event["args"][key] for key in read}}
        kept.append(json.dumps(without_controls(known)))
    return f"[{','.join(kept)}]".encode()


def check_graph(model: bytes, original: int) -> None:
    """Refuse an optimised model that is none, or far larger than the `original` bytes of the model that it is made of.

    Raises:
        ValueError: it is refused.
    """
    if len(model) > _FIRST + _GROWTH * original:
        raise ValueError(f"an optimised model of {len(model)} bytes")
    try:
        onnx.load_model_from_string(model)
    except DecodeError as error:
        raise ValueError("the optimised model is none") from error
