"""Run graphs: onnxruntime's sessions, its plug-ins, and packages that run models without onnxruntime.

In: a model's file and an engine's description. Out: objects with the interface of an `InferenceSession`.
"""
