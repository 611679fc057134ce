"""Runs Python and shell code that nobody has read: isolated, limited, and without a trace in the next run."""
