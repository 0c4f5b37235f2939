"""Check, prepare and describe models, and provide the in-memory graph that all packages share.

`edgeq.model.load` parses a model once and passes it on as an `onnx_ir.Model`. Code that changes a model changes a
`clone()`, which shares the weights with the original. Only two places use the protobuf form: code that reads and writes
files, and calls to libraries that accept nothing else.
"""
