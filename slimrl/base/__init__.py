"""What is not about reinforcement learning: files, threads, processes, imports, lines of JSON."""
