"""Draw charts as SVG with functions from values to markup. Colours are classes, so that style.css can define two sets
of them.
"""
