"""Write resizing, padding, and moves between channels and pixels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgeq.backends.ncnn.lower import NcnnLowering, NotInNcnnError
from edgeq.backends.ncnn.network import Setting
from edgeq.model.graph import is_op, node_input

_NEAREST, _BILINEAR = 1, 2


def write_resize(work: NcnnLowering, node: ir.Node) -> None:
    """Write Interp, nearest or bilinear."""
    shape, output = work.shape(node.inputs[0]), work.shape(node.outputs[0])
    if len(shape) != 4 or shape[:2] != output[:2] or shape[0] != 1:
        raise NotInNcnnError("it resizes other axes than rows and columns, or several images")
    settings_ = node.attributes
    default = "half_pixel" if is_op(node, "Resize") else "asymmetric"
    mode = settings_.get_string("mode", "nearest")
    placement = settings_.get_string("coordinate_transformation_mode", default)
    if settings_.get_int("antialias", 0):
        raise NotInNcnnError("it smooths with antialias")
    source = work.shaped(work.blob(node.inputs[0]), shape[1:])
    if shape == output:
        work.hold(node.outputs[0], source)
        return
    sizes: dict[int, Setting] = {3: output[2], 4: output[3]}
    if mode == "nearest":
        rounding = settings_.get_string("nearest_mode", "round_prefer_floor" if is_op(node, "Resize") else "floor")
        if not all(_is_floor(shape[a], output[a], placement, rounding) for a in (2, 3)):
            raise NotInNcnnError(f"it picks other pixels (mode {placement}, {rounding}) than ncnn, which rounds down")
        settings: dict[int, Setting] = {0: _NEAREST, **sizes}
    elif mode == "linear":
        if placement == "align_corners":
            settings = {0: _BILINEAR, **sizes, 6: 1}
        elif placement == "half_pixel" or (placement == "pytorch_half_pixel" and min(output[2:]) > 1):
            settings = {0: _BILINEAR, **sizes}
        else:
            raise NotInNcnnError(f"it interpolates with {placement}; ncnn has half_pixel and align_corners")
    else:
        raise NotInNcnnError(f"its mode is {mode}; edgeq writes nearest and linear")
    work.hold(node.outputs[0], work.emit("Interp", (source,), output[1:], settings))


def _is_floor(size: int, output: int, placement: str, rounding: str) -> bool:
    """Return whether ONNX's nearest mode picks the pixels i * size // output, as ncnn does."""
    places, scale = np.arange(output, dtype=np.float64), size / output
    if placement == "asymmetric":
        exact = places * scale
    elif placement in ("half_pixel", "pytorch_half_pixel"):
        exact = (places + 0.5) * scale - 0.5
    elif placement == "align_corners" and output > 1:
        exact = places * (size - 1) / (output - 1)
    else:
        return False
    rounded = {
        "floor": np.floor(exact),
        "ceil": np.ceil(exact),
        "round_prefer_floor": np.ceil(exact - 0.5),
        "round_prefer_ceil": np.floor(exact + 0.5),
    }.get(rounding)
    if rounded is None:
        return False
    picked = np.clip(rounded, 0, size - 1)
    # ncnn computes the place in float32.
    wanted = np.minimum((places.astype(np.float32) * np.float32(scale)).astype(np.int64), size - 1)
    return bool(np.array_equal(picked, wanted))


def write_depth_to_space(work: NcnnLowering, node: ir.Node) -> None:
    """Write PixelShuffle."""
    source, mode = work.image(node.inputs[0]), node.attributes.get_string("mode", "DCR")
    settings: dict[int, Setting] = {0: node.attributes.get_int("blocksize", 1), 1: int(mode == "DCR")}
    work.hold(node.outputs[0], work.emit("PixelShuffle", (source,), work.shape(node.outputs[0])[1:], settings))


def write_space_to_depth(work: NcnnLowering, node: ir.Node) -> None:
    """Write Reorg, whose mode 1 has ONNX's order of channels."""
    source = work.image(node.inputs[0])
    settings: dict[int, Setting] = {0: node.attributes.get_int("blocksize", 1), 1: 1}
    work.hold(node.outputs[0], work.emit("Reorg", (source,), work.shape(node.outputs[0])[1:], settings))


def write_pad(work: NcnnLowering, node: ir.Node) -> None:
    """Write Padding of channels, rows and columns."""
    mode = node.attributes.get_string("mode", "constant")
    types = {"constant": 0, "edge": 1, "reflect": 2}
    if mode not in types:
        raise NotInNcnnError(f"it pads in mode {mode}")
    source, rank = work.image(node.inputs[0]), len(work.shape(node.inputs[0]))
    amounts, axes_value = work.numbers(node.inputs[1]), node_input(node, 3)
    axes = [axis % rank for axis in work.numbers(axes_value)] if axes_value is not None else list(range(rank))
    pads = {
        axis: (amounts[i], amounts[i + len(axes)])
        for i, axis in enumerate(axes)
        if amounts[i] or amounts[i + len(axes)]
    }
    if any(min(pair) < 0 for pair in pads.values()):
        raise NotInNcnnError("it has negative pads")
    places = {work.axis(node.inputs[0], axis) - len(source.dims): pair for axis, pair in pads.items()}
    value = node_input(node, 2)
    number = float(work.floats(value).reshape(())) if value is not None else 0.0
    if not set(places) <= {-1, -2, -3} or (mode != "constant" and -3 in places):
        raise NotInNcnnError("it pads other axes than channels, rows and columns")
    settings: dict[int, Setting] = {4: types[mode], 5: number}
    for place, keys in ((-2, (0, 1)), (-1, (2, 3)), (-3, (7, 8))):
        settings.update(zip(keys, places.get(place, (0, 0)), strict=True))
    dims = tuple(size + sum(places.get(i - len(source.dims), (0, 0))) for i, size in enumerate(source.dims))
    work.hold(node.outputs[0], work.emit("Padding", (source,), dims, settings))
