"""`slimrl-tools convert`: Hugging Face to torch_dist and back."""
