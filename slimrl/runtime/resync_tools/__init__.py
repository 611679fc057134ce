"""Resyncs without a run: `slimrl resync bench` and `slimrl resync estimate`."""
