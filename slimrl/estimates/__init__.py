"""What a run will take, computed without one: memory, time, transfers."""
