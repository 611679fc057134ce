"""What runs inside the sandbox: the warm interpreter and its forks. Standard library only, nothing of slimrl."""
