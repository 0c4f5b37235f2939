"""Element types: ONNX Runtime's names for them, numpy's, and their sizes."""

from __future__ import annotations

from typing import Mapping

DTYPES: Mapping[str, str] = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{f"tensor({kind}{bits})": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}

ELEMENT_BITS: Mapping[int, int] = {
    **dict.fromkeys((25, 26), 2),  # UINT2, INT2
    **dict.fromkeys((21, 22, 23), 4),  # UINT4, INT4, FLOAT4E2M1
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),  # UINT8, INT8, BOOL, FLOAT8E4M3FN ... FLOAT8E8M0
    **dict.fromkeys((4, 5, 10, 16), 16),  # UINT16, INT16, FLOAT16, BFLOAT16
    **dict.fromkeys((1, 6, 12), 32),  # FLOAT, INT32, UINT32
    **dict.fromkeys((7, 11, 13, 14), 64),  # INT64, DOUBLE, UINT64, COMPLEX64
    15: 128,  # COMPLEX128
}
"""Bits of one element, by number of TensorProto.DataType. Strings (8) have no fixed size and cannot be external."""
