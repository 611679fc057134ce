"""`slimrl-tools` commands that show what a checkpoint or a configuration holds."""
