"""Execute a graph: sessions of onnxruntime, engines, processes that run them, and toolkits that compile.

In: a model file and `SessionSettings`. Out: sessions in this process or in a guest. Devices do the same in
edgeq_device/engines.
"""
