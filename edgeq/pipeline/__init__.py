"""The former place of `edgeq.jobs`; its documented name stays importable here."""
