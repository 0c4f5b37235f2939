"""C code for a systolic array. An integer program and a few samples become a folder of C: the layers as calls of
gemmini.h, the quantized samples, and the values that the simulator expects after each layer.
"""
