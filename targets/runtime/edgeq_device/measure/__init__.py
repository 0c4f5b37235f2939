"""Time functions side by side, compare outputs, and say only what the measurements support.

In: functions that run one query, and pairs of outputs. Out: distributions, claims and reports. Nothing here opens a
model.
"""
