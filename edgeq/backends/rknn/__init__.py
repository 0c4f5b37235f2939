"""The backend for Rockchip's NPUs. A prepared float model becomes a Q/DQ file whose numbers Rockchip's compiler keeps
(`dialect`). The compiler, which runs in an environment of its own, turns the file into a compiled form for one chip,
and its simulator checks that form against the file.
"""
