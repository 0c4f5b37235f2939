"""Write quantized graphs: Q/DQ, QOperator, dynamic and weight-only.

In: a prepared model, ranges and a scheme. Out: the quantized model, not yet proven. The public function
`edgeq.quantize` is `edgeq.jobs.quantize.quantize`.
"""
