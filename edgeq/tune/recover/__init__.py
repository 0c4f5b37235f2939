"""Recover accuracy where a quantized model falls short of the float model.

Each method is a module and a `Recovery` of its own; `run.Recoverer` applies several in the order that makes sense.
"""
