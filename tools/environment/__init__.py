"""`slimrl-tools environment`: environments that others made."""
