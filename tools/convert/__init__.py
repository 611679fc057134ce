"""`slimrl-tools convert`: Hugging Face to torch_dist and back, and GGUF to Hugging Face."""
