"""Run the float model once over samples, and derive from its statistics the range of each tensor.

In: a prepared model and samples. Out: `Statistics`, and from these `Range`s by any method without another run. The
public function `edgeq.calibrate` is `edgeq.jobs.calibrate.calibrate`.
"""
