"""Know machines: detect this one, and read profiles (classes of hardware) and targets (places to deploy to) from TOML.

Everything here is data about hardware. `Machine`, `Profile` and `Target` go out to the code that quantizes, builds and
runs models, and no condition there names a CPU.
"""
