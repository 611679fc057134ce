"""Block FP8: tiles of 128 x 128 with a scale each; and rounding to FP8 and back, in tiles of any shape."""
