"""Processes of their own in which models are opened, run and timed: other machines' kernels, and plug-in engines."""
