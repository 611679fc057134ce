"""`slimrl-tools` commands that derive a checkpoint from others: average, slice, quantize."""
