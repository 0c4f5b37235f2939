"""Describe models without loading them: external data, metadata, inputs and outputs.

In: an untrusted ONNX file. Out: its references to other files, and the types of its tensors.
"""
