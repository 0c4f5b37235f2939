"""Run the target's own kernels on this machine, with qemu or CPUID masking, and prove that the right kernels ran."""
