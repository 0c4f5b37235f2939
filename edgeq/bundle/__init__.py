"""Write, sign, verify, push and pull bundles. Devices read them with edgeq_device/bundle.

In: a `BundleSpec` with models, options and self-tests. Out: an ONNX Runtime model package with a runner inside.
"""
