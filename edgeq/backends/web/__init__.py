"""Build for ONNX Runtime Web: what the CPU backend builds, run and timed in its wasm runtime, with a page that
checks it.
"""
