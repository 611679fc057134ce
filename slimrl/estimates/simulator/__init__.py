"""Simulation of a run's rollout modes with its own admission and without models. No GPU and no process is used."""
