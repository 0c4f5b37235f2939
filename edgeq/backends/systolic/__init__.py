"""The backend for systolic arrays. A prepared float model becomes a network of layers (`build`), its channels and
scales are chosen, and the network is lowered to an integer program (`program`). The simulator runs the program bit by
bit. The reference model, the dialect's file and the C code are translations of the program.
"""
