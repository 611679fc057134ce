"""`slimrl-tools` commands that write toy models, their tokenizer and the calculator's data."""
