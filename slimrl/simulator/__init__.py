"""Who waits for whom in a run, simulated with its own admission and without models. No GPU and no process is used."""
