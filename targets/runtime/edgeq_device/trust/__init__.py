"""Decide whom to trust: signatures, the keys that the owner of this machine chose, and connections to registries.

In: bytes from an untrusted sender or server. Out: a signer, or an error that names what is wrong.
"""
