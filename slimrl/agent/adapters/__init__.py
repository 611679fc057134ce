"""Environments of other libraries as environments of slimrl (docs/agents.md)."""
