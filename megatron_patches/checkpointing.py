"""Distributed checkpoints without a GPU."""

from megatron_patches.respell import respell


def respell_metadata_check() -> None:
    """dist_checkpointing/strategies/state_dict_saver.py:204: a flag that ranks agree on is allocated on "cuda"."""
    module = "megatron.core.dist_checkpointing.strategies.state_dict_saver"
    respell(module, "verify_global_md_reuse", ("device='cuda'", "device='cpu'", 1))


def fork_the_result_queue() -> None:
    """dist_checkpointing/strategies/filesystem_async.py:54 starts its queue in a spawned process.

    That process imports `__main__` again: seconds per save, and a script without a main guard runs twice.
    """
    module = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    respell(module, "_get_write_results_queue", ('mp.get_context("spawn")', 'mp.get_context("fork")', 1))
