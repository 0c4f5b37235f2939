"""Recover accuracy if a quantized model falls short of the float model.

In: a job, a scheme and names of recoveries (`run.Recoverer`), or an SQNR to reach by layers in float (`float_search`).
Out: a build. Each recovery is a module of `methods` with a `Recovery` of its own.
"""
