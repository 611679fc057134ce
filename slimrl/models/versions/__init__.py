"""Versions of a model's weights as folders on a disk: whole, or as what changed against another one."""
