"""`slimrl-tools synthesize`: questions from a graph of facts, each with its answer and its proof."""
