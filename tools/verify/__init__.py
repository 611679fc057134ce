"""`slimrl-tools` commands that compare checkpoints."""
