"""Auto-tuning."""
