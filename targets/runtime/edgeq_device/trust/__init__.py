"""Decide what a bundle or a server is trusted with: signatures, the owner's keys, and connections with limits.

In: bytes from somebody else. Out: who signed them, or an error.
"""
