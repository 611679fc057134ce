"""`slimrl-tools` commands for tasks that search: a corpus with questions, and the index of a corpus."""
