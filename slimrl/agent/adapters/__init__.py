"""Environments of other libraries as environments of slimrl (docs/adapters.md)."""
