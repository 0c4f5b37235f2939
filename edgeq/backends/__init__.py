"""Backends: one for each kind of hardware or runtime. Each turns a prepared float model, calibrated ranges and a scheme
into an artifact: the file to deploy, and what the proof, the report and the bundle need to know about it. `base`
defines the interface. A profile names its backend, and `edgeq.util.registry` finds it by that name.
"""
