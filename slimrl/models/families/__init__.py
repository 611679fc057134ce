"""Model families, one file for each: which Hugging Face tensor is which Megatron parameter."""
