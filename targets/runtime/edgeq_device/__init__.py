"""Provide the part of edgeq that travels inside a bundle. It needs only Python 3.9+, numpy and onnxruntime.

It imports nothing of edgeq. edgeq imports it, so the workstation and the device run the same code.
"""
