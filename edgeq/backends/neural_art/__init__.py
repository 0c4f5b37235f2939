"""Build Q/DQ models for ST's Neural-ART, which ST's own compiler reads."""
