"""Measure on the device: the CPU's features and state, latencies, what may be claimed about them, and paired outputs.

In: functions to time, or outputs to compare. Out: distributions, claims and reports.
"""
