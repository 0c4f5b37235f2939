"""The former place of `edgeq.model`'s in-memory graph; its documented name stays importable here."""
