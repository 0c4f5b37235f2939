"""One in-memory model for all packages: `onnx_ir.Model`, its queries, its operators, its quantization parameters, its
edits.

A model is parsed once, where it is loaded (`edgeq.model.load`), and passed on as a value: whoever changes one changes a
`clone()` of it, which shares the weights. The protobuf form exists where files are read and written, and where an
interface of another library takes nothing else.
"""
