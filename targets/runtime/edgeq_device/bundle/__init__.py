"""Open a bundle: check its files, read its variants, choose one of them, run its self-test, and time it.

In: the folder or `.edgeq` zip of a bundle, which is untrusted. Out: sessions of the chosen variant, and reports.
"""
