"""Turn files into a model's inputs: images by the steps that a bundle records, arrays in numpy's formats, made-up data.

In: paths of files, or the inputs of a session. Out: numpy arrays by input name.
"""
