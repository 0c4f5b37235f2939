"""Measure models: their accuracy against labels, their agreement with a float model, their kernels and their latency.

Open sessions and samples come in. Frozen figures go out (`Accuracy`, `Agreement`, `Coverage`, `Measurement`,
`Diagnosis`), made from sums that are updated sample by sample, so that no outputs are kept.
"""
