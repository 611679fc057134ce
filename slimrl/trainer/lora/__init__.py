"""LoRA adapters inside Megatron's linear layers."""
