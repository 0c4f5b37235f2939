"""Show that a build does on its target what the float model does.

In come a job, the artifacts of the backends and samples. Out go proofs: coverage in int8, agreement with the float
model, accuracy, speed, and the decision about kernels that saturate. `edgeq.jobs` writes no output without a proof.
"""
