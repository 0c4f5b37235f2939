"""Build for ONNX Runtime Web: the CPU backend's models, run and timed in the wasm runtime, with a page that checks
them.
"""
