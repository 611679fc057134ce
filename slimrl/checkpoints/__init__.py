"""Model checkpoints on a disk: Hugging Face folders, and megatron-core's torch_dist format in its own package."""
