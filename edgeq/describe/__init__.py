"""Read what a model says about itself: metadata in the ONNX file, and the files that exporters write next to it.

In: a model and its path. Out: `ModelFacts` (preprocessing, labels, task, head, thresholds), each with its source.
"""
