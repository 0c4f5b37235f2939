"""Run a bundle on its device with only Python 3.9, numpy and onnxruntime.

In: the bundle that an untrusted sender wrote. Out: what `cli.py` prints, and the `Model` of `program.py`, the two
doors. The rooms import only downwards: system, trust, model, prepare, measure, engines, bundle.
"""
