"""Keep the former name of `edgeq.model`'s in-memory graph importable, because it was documented."""
