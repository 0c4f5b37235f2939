"""Use the device's system safely: files, temporary folders, programs, output of libraries, JSON, and limits.

Everything here treats what it reads as untrusted.
"""
