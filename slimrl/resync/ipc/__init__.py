"""Shared memory and CUDA IPC between the processes of a run."""
