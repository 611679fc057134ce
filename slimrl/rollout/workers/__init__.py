"""Processes that run episodes for the driver (docs/agents.md#several-processes)."""
