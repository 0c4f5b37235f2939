"""Turn files into a model's inputs: images by the steps that a bundle records, and arrays in numpy's formats."""
