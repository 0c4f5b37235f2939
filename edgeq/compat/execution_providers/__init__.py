"""Stands for `onnxruntime.quantization.execution_providers`."""
