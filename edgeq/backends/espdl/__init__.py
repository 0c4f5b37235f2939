"""Build int8 models for ESP-DL, the runtime of Espressif's chips: an integer graph, its .espdl file, and an interpreter
that gives the chip's integers.
"""
