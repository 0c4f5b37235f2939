"""Stands for `onnxruntime.quantization.CalTableFlatBuffers`. `edgeq.calibrate.table` reads the whole file, checked."""
