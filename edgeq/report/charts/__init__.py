"""Draw charts as SVG: functions from values to markup. Colours are classes, so that style.css can have two sets of
them.
"""
