"""Signatures of OpenSSF Model Signing 1.0, made with keys and certificates; edgeq_device reads and verifies them."""
