"""Environments that others made: a thin class for each, its data, and players by script (docs/environments.md).

Their packages are in virtual environments of their own, one for each, where the modules of these folders are imported:
those may import the standard library, their packages, and what of slimrl needs nothing else.
"""
