"""Keep the former, documented name of `edgeq.model`'s in-memory graph importable."""
