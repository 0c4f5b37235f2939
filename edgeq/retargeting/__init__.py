"""Rewrite models that are already quantized for another runtime.

In: a quantized model in any dialect. Out: a Q/DQ model for a target, with a comparison of the two. The public function
`edgeq.retarget` is `edgeq.retargeting.run.retarget`.
"""
