"""Draw charts as SVG. Each function takes values and returns markup. Colours are classes, so that style.css can define
two sets of colours.
"""
