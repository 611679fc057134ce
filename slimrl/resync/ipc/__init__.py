"""Shared memory, CUDA IPC and broadcast groups between the processes of a run."""
