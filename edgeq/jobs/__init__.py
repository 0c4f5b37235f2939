"""Do whole jobs: each module turns one request of a user into an output and a result that describes it.

A `Request` or the paths of a user come in. A model, a bundle or statistics go out, with a frozen result such as
`Quantized`.
"""
