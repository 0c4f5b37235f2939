"""The backend for LiteRT and TFLite Micro. A prepared float model becomes a Q/DQ model with the ranges that the kernels
of .tflite files need. `lower` and `operators` turn such a model into tensors and operators of a file, `rules` checks
them, and `writer` writes the bytes. Files for microcontrollers come with sources, and with vela's estimate.
"""
