"""Check, prepare and describe models; and provide the in-memory graph that all packages share.

A model is parsed once, where it is loaded (`edgeq.model.load`), and passed on as an `onnx_ir.Model`: code that changes
a model changes a `clone()` of it, which shares the weights. The protobuf form exists where files are read and written,
and where an interface of another library takes nothing else.
"""
