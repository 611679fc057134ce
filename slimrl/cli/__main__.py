"""`python -m slimrl.cli`."""

from slimrl.cli import app

app()
