"""Find the engines of this device, and open models in them, in this process or in another one.

In: a `Variant`, whose options come from a bundle. Out: sessions with the interface of onnxruntime's.
"""
