"""Read samples: files, folders and Python objects become the inputs of a model, one sample at a time.

In come a source, a preprocessing and labels, as the user names them. `open_samples` returns `Samples`, which the float
pass, accuracy and benchmarks iterate over.
"""
