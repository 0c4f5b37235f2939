"""Check, prepare and describe models. In: untrusted ONNX files. Out: `onnx_ir.Model`s, prepared ones for all backends.

A model is parsed once and passed on in memory. Code that changes it changes a `clone()`, which shares the weights. Only
code that reads and writes files, or calls a library that accepts nothing else, uses the protobuf form.
"""
