"""Function calling over several turns: the stateful tools, the entries and the checker of BFCL (package bfcl-eval)."""
