"""Provide the part of edgeq that travels inside a bundle: Python 3.9+, numpy and onnxruntime, nothing else.

It imports nothing of edgeq; edgeq imports it, so that the workstation and the device run the same code.
"""
