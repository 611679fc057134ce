"""megatron-core's checkpoint format, read and written without Megatron."""
