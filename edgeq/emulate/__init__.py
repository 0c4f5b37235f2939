"""Run the target's own kernels on this machine, with qemu or CPUID masking, and prove that the right kernels ran.

`routes` finds the best way to a target's kernels, and `check` runs a model on them. `kernels` and `audit` compute in
numpy what saturating kernels give, on any machine.
"""
