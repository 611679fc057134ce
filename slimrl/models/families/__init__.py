"""One file for each model family: which Hugging Face tensor is which Megatron parameter."""
