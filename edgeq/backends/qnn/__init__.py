"""The backend for Qualcomm's NPU. A prepared float model becomes a Q/DQ file in the form that the NPU's kernels take.
The engine, which also simulates the NPU, then tells which nodes it accepts; the others run on the CPU.
"""
