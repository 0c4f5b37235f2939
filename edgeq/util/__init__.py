"""Serve all other packages: records, outputs that appear completely or not at all, registries, processes and progress.

Nothing here knows models or hardware. Values, paths and texts come in; checked records, files and lines for users go
out.
"""
