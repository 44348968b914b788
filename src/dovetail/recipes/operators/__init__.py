"""Operators of recipes, one module per operator, with Data-Juicer's names, parameters and results.

Module `x_y_filter` has the class `XYFilter`; `catalogue.py` finds it by that name and imports no other.
"""
