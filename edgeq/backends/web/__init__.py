"""Build for ONNX Runtime Web. The models are the CPU backend's, but edgeq runs and times them in the wasm runtime and
adds a page that checks them.
"""
