"""Run the target's own kernels on this machine: qemu, CPUID masking, and proof that the right kernels ran."""
