"""Processes that run episodes for the driver (docs/environments.md)."""
