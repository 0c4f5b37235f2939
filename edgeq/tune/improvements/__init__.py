"""Improvements of a poor result, one kind a file with its object `IMPROVEMENT`: see `edgeq.prove.checks`."""
