"""Distributed checkpoints: results of writing and what fails there, and the gathering of optimizer states."""

import functools
import queue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_patches.patching import patch_attr, patch_source

PIECE_ELEMENTS = 2**26
"""Elements, of all ranks of a group together, that its first rank receives at a time."""


def keep_results_in_process() -> None:
    """dist_checkpointing/strategies/filesystem_async.py passes write results through a manager process.

    That process is spawned, so it imports `__main__` again, which costs seconds per save and runs a script without a
    main guard twice; and it outlives a killed trainer. slimrl writes in a thread of the rank, so a queue within the
    process is enough: one for each checkpoint, since two may be written at a time.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    patch_attr(filesystem_async, "get_write_results_queue", lambda mp_mode="spawn": queue.Queue())


def copy_views_one_at_a_time() -> None:
    """dist_checkpointing/strategies/filesystem_async.py copies every view of a larger tensor before it writes one.

    Optimizer states are views of what was gathered, so a save would take their 12 bytes a parameter twice. slimrl
    copies early what training changes, and nothing else (trainer/checkpointing/writing.py). On any device.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    early = ("return ten.clone() if is_view else ten", "return ten", 1)
    patch_source(filesystem_async.__name__, "FileSystemWriterAsync.prepare_write_data", early)
    original = filesystem_async._write_item

    @functools.wraps(original)  # The caller looks at the parameters.
    def write_item(*given: Any, **options: Any) -> Any:
        return original(*(item.clone() if isinstance(item, Tensor) else item for item in given), **options)

    patch_attr(filesystem_async, "_write_item", write_item)


def report_files_that_cannot_be_written() -> None:
    """dist_checkpointing/strategies/state_dict_saver.py leaves ranks waiting if the first cannot write the metadata.

    It writes that before it tells them whether all went well, and its error kept it from that. Now it tells them so.
    Of other files filesystem_async.py names the class of the error; here it says what the error says. On any device.
    """
    folder = "megatron.core.dist_checkpointing.strategies"
    method = "FileSystemWriterAsync.write_preloaded_data_multithread"
    patch_source(f"{folder}.filesystem_async", method, (", type(local_results_or_exc)", ", local_results_or_exc", 1))
    written = "            storage_writer.finish(global_metadata, all_results)\n"
    told = (
        "            try:\n"
        "                storage_writer.finish(global_metadata, all_results)\n"
        "            except OSError as error:\n"
        "                node_failures = {dist_wrapper.coordinator_rank: (error, None)}\n"
    )
    patch_source(f"{folder}.state_dict_saver", "save_state_dict_async_finalize", (written, told, 1))


def gather_optimizer_in_pieces() -> None:
    """optimizer/distrib_optimizer.py takes up to 36 bytes a parameter of host memory as it gathers states on one rank.

    A third of them is what it gathers; the others are copies of shards, of what came last and of what came before. A
    node of DeepSeek-V3's ranks would need more than it has. Here shards arrive in pieces, right where they belong.
    Loading, and the way through GPU memory, are left alone. On any device.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "get_parameter_state_dp_zero"
    original = getattr(DistributedOptimizer, name)

    def get_parameter_state_dp_zero(
        self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[Any, Any] | None:
        if empty_data or return_on_all_ranks or not use_gloo_comm:
            return original(self, use_gloo_comm, empty_data, return_on_all_ranks)
        return _gathered_state(self)

    patch_attr(DistributedOptimizer, name, get_parameter_state_dp_zero)


def _gathered_state(optimizer: Any) -> dict[Any, Any] | None:
    """Main weights and moments of whole buffers in float32; None but on the first rank of the data-parallel group."""
    group = optimizer.data_parallel_group_gloo
    keys = ("param", *optimizer.optimizer_state_keys)
    state: dict[Any, Any] = {"buckets_coalesced": True}
    # Used again for everything: gloo's threads keep what they sent for a while, so new memory would come on top.
    sizes = [_shard_size(bucket, group) for buffer in optimizer.buffers for bucket in buffer.buckets]
    largest = max(sizes, default=0)
    own, received = torch.empty(largest, device="cpu"), _pieces(largest, group)
    for index, (buffer, of_dtype) in enumerate(zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True)):
        ((dtype, ranges_of_buckets),) = of_dtype.items()
        whole: dict[str, Any] = {}
        if group.rank() == 0:
            whole = {key: torch.zeros(buffer.numel_unpadded, device="cpu") for key in keys}
        start = 0
        for bucket, ranges in zip(buffer.buckets, ranges_of_buckets, strict=True):
            end, shard = start + bucket.numel_unpadded, own[: _shard_size(bucket, group)]
            for key in keys:
                _fill(shard, optimizer, ranges["param_map"], key)
                _gather(shard, received, whole[key][start:end] if whole else None, group)
            start = end
        state[index] = {dtype: whole | {"numel_unpadded": buffer.numel_unpadded}}
    return state if group.rank() == 0 else None


def _shard_size(bucket: Any, group: dist.ProcessGroup) -> int:
    return bucket.grad_data.numel() // group.size()


def _pieces(largest: int, group: dist.ProcessGroup) -> list[Tensor]:
    """On the first rank, where it receives a piece of the shard of each rank; none elsewhere."""
    size = min(largest, max(1, PIECE_ELEMENTS // group.size()))
    return [torch.empty(size, device="cpu") for _ in range(group.size() if group.rank() == 0 else 0)]


def _fill(shard: Tensor, optimizer: Any, ranges: dict[Any, Any], key: str) -> None:
    """Write this rank's part of a bucket; zeros where it is padding."""
    shard.zero_()
    for parameter, place in ranges.items():
        value = optimizer._get_main_param_and_optimizer_states(parameter)[key]
        shard[place["gbuf_local"].start : place["gbuf_local"].end].copy_(value.detach())


def _gather(shard: Tensor, received: list[Tensor], whole: Tensor | None, group: dist.ProcessGroup) -> None:
    """Write the shards of all ranks, one after the other and without the padding at the end, into `whole`.

    Args:
        received: memory for a piece of each rank's shard.
        whole: on the first rank; None on the others.
    """
    size = max(1, PIECE_ELEMENTS // group.size())
    for begin in range(0, len(shard), size):
        piece = shard[begin : begin + size]
        parts = None if whole is None else [part[: len(piece)] for part in received]
        dist.gather(piece, parts, dist.get_global_rank(group, 0), group)
        for rank, part in enumerate(parts or []):
            room = whole[rank * len(shard) + begin :][: len(part)]  # type: ignore[index]
            room.copy_(part[: len(room)])
