"""Prompt files from published data sets."""
