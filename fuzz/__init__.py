"""Fuzzing of every reader of untrusted input: `scripts/fuzz`. docs/security.md says what was tried and found."""
