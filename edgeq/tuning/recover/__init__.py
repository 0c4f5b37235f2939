"""Recover accuracy if a quantized model falls short of the float model.

Each method is a module with a `Recovery` of its own. `run.Recoverer` applies several of them in the right order.
"""
