"""Block FP8: tiles of 128 x 128 with a scale each."""
