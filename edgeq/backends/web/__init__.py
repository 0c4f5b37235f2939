"""Build for ONNX Runtime Web. The CPU backend builds the models. edgeq runs and times them in the wasm runtime, and
adds a page that checks them.
"""
