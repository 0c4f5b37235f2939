"""Record what a user sees of edgeq as text in `recorded/`, and the bytes of its artifacts (`artifacts.py`)."""
