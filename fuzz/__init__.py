"""Fuzz every reader of untrusted input: `scripts/fuzz`. docs/security.md lists what was tried and found."""
