"""Distributed checkpoints: the queue of write results."""

import queue

from megatron_patches.patching import patch_attr


def keep_results_in_process() -> None:
    """dist_checkpointing/strategies/filesystem_async.py passes write results through a manager process.

    That process is spawned, so it imports `__main__` again, which costs seconds per save and runs a script without a
    main guard twice; and it outlives a killed trainer. Only asynchronous saves pass results between processes.
    slimrl saves synchronously, so a queue within the process is enough.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue = queue.Queue()
    patch_attr(filesystem_async, "get_write_results_queue", lambda mp_mode="spawn": results)
