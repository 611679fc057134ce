"""Versions of a model's weights as folders on a disk: whole, or deltas on another version."""
