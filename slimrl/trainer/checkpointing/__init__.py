"""Training checkpoints and exports, on the trainer's ranks."""
