"""Write models for ncnn: one file with ncnn's text and weights, in float or with int8 layers."""
