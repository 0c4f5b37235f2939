"""Search for the best quantized form of a model, and repair poor ones.

In: a job with statistics, and a goal. Out: the chosen candidate, with the record of all that were tried. The public
function `edgeq.tune` is `edgeq.jobs.tune.tune`.
"""
