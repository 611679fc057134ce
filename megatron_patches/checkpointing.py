"""Distributed checkpoints: the queue of write results on any device, a flag on "cuda" without one."""

import queue

from megatron_patches.respell import rebind, respell


def respell_metadata_check() -> None:
    """dist_checkpointing/strategies/state_dict_saver.py:204: a flag that ranks agree on is allocated on "cuda"."""
    module = "megatron.core.dist_checkpointing.strategies.state_dict_saver"
    respell(module, "verify_global_md_reuse", ("device='cuda'", "device='cpu'", 1))


def keep_results_in_process() -> None:
    """dist_checkpointing/strategies/filesystem_async.py:54 passes write results through a manager process.

    That process is spawned, so it imports `__main__` again, which costs seconds per save and runs a script without a
    main guard twice; and it outlives a trainer that is killed. The results cross a process boundary only if the save
    is asynchronous, which slimrl's is not: a queue of this process serves.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    results: queue.Queue = queue.Queue()
    rebind(filesystem_async, "_get_write_results_queue", lambda: results)
