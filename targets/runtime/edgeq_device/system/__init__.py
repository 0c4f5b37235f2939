"""Deal with the operating system: files, folders, processes, limits, printing, and what the machine has.

In: paths and environment variables. Out: checked files, private folders, text that is safe to print, CPU and GPUs.
"""
