"""The preprocessings that ship with edgeq, as data. `edgeq preprocess show NAME` prints the arithmetic of each.

The six older names (caffe … preprocess_method2) are those of the calibration scripts that users come from. Applied to
arrays they expect raw 0..255 values, red first, channels before rows; applied to images they first resize to the
model's width and height, aspect not kept (the scripts left the filter to Pillow, whose default then was bicubic).
"""

from __future__ import annotations

from typing import Any

_TO_MODEL = {"op": "resize", "size": "model", "rule": "exact", "filter": "bicubic"}
_CHW = {"op": "layout", "axes": "CHW"}
_BGR = {"op": "channels", "order": "BGR"}
_MODEL_LAYOUT = {"op": "layout", "axes": "model"}
_RAW_CHW = {"layout": "CHW"}

BUILTIN: dict[str, dict[str, Any]] = {
    "none": {
        "title": "Identity (also called raw): values as they are (images: decoded RGB, 0..255)",
        "steps": [_MODEL_LAYOUT],
    },
    "caffe": {
        "title": "BGR, minus the mean colour, times 0.017",
        "source": _RAW_CHW,
        "steps": [
            _TO_MODEL,
            _BGR,
            {"op": "subtract", "value": [103.94, 116.78, 123.68]},
            {"op": "multiply", "value": 0.017},
            _MODEL_LAYOUT,
        ],
    },
    "caffe2": {
        "title": "BGR, minus the mean colour",
        "source": _RAW_CHW,
        "steps": [_TO_MODEL, _BGR, {"op": "subtract", "value": [103.939, 116.779, 123.68]}, _MODEL_LAYOUT],
    },
    "mxnet": {
        "title": "ImageNet mean and deviation of 0..1 values, emitted BGR (unlike `imagenet`)",
        "source": _RAW_CHW,
        "steps": [
            _TO_MODEL,
            _BGR,
            {"op": "divide", "value": 255},
            {"op": "subtract", "value": [0.406, 0.456, 0.485]},
            {"op": "divide", "value": [0.225, 0.224, 0.229]},
            _MODEL_LAYOUT,
        ],
    },
    "rcnn": {
        "title": "BGR, minus the mean colour, for a CHW input without a batch axis",
        "source": _RAW_CHW,
        "steps": [_TO_MODEL, _BGR, {"op": "subtract", "value": [102.9801, 115.9465, 122.7717]}, _CHW],
    },
    "preprocess_method1": {
        "title": "[-1, 1], minus the image's own mean",
        "source": _RAW_CHW,
        "steps": [
            _TO_MODEL,
            {"op": "divide", "value": 127.5},
            {"op": "subtract", "value": 1},
            {"op": "center"},
            _MODEL_LAYOUT,
        ],
    },
    "preprocess_method2": {
        "title": "RGB, minus the mean colour",
        "source": _RAW_CHW,
        "steps": [_TO_MODEL, {"op": "subtract", "value": [123.68, 116.78, 103.94]}, _MODEL_LAYOUT],
    },
    "imagenet": {
        "title": "torchvision's ImageNet evaluation: short side 256, centre 224, RGB, mean and deviation",
        "steps": [
            {"op": "resize", "size": 256, "rule": "short", "filter": "bilinear", "rounding": "floor"},
            {"op": "crop", "size": 224, "rounding": "round"},
            {"op": "divide", "value": 255},
            {"op": "subtract", "value": [0.485, 0.456, 0.406]},
            {"op": "divide", "value": [0.229, 0.224, 0.225]},
            _MODEL_LAYOUT,
        ],
    },
    "tf": {
        "title": "TensorFlow's [-1, 1]: resized to the model, RGB, x / 127.5 - 1",
        "steps": [
            {"op": "resize", "size": "model", "rule": "exact", "filter": "bilinear"},
            {"op": "divide", "value": 127.5},
            {"op": "subtract", "value": 1},
            _MODEL_LAYOUT,
        ],
    },
}

ALIASES = {"raw": "none", "None": "none"}
