"""Every change that slimrl makes to megatron-core: one function per patch, each saying why.

Call `apply()` before building a Megatron module. Some patches fix faults or slow places everywhere. Some stand in for
Transformer Engine, wherever the layers are Megatron's own, on a GPU too. The others let megatron-core run on CPU
tensors and gloo process groups, and are left out if there is a GPU. File names in the docstrings are relative to
megatron/core.
"""

from collections.abc import Callable

from megatron_patches import checkpointing, collectives, cuda_calls, layers, literals, offloaded_optimizer, rng, rope
from megatron_patches.first_import import import_megatron
from slimrl import device

Patch = Callable[[], None]

VERSION = "0.19.2"
"""Version of megatron-core that the patches are written for."""

ANY_DEVICE: tuple[Patch, ...] = (
    layers.replicate_mla_down_projections,
    layers.keep_query_without_norm,
    layers.complete_local_norms,
    layers.offer_delta_nets,
    layers.offer_sparse_attention,
    layers.compute_delta_rule_in_torch,
    literals.add_expert_biases_out_of_place,
    literals.multiply_router_weights_of_another_dtype,
    rope.rotate_packed_sequences_at_once,
    checkpointing.keep_results_in_process,
    checkpointing.copy_views_one_at_a_time,
    checkpointing.report_files_that_cannot_be_written,
    checkpointing.gather_optimizer_in_pieces,
    offloaded_optimizer.start_offloaded_state_at_zero,
    offloaded_optimizer.keep_classes_out_of_offloaded_state,
)
"""Fix faults, and places that are slow, with a GPU too."""

WITHOUT_TRANSFORMER_ENGINE: tuple[Patch, ...] = (
    literals.keep_steps_of_torch_adam,
    layers.name_replicated_linear,
    layers.offer_core_attention,
)
"""Let Megatron's own layers and torch's Adam do what Transformer Engine's do, on any device."""

WITH_TRANSFORMER_ENGINE: tuple[Patch, ...] = (layers.offer_attention_of_transformer_engine,)
"""Put Transformer Engine's modules beside Megatron's own layers, where a model has these."""

CPU_ONLY: tuple[Patch, ...] = (
    cuda_calls.replace_torch_cuda,
    cuda_calls.make_cuda_moves_identity,
    cuda_calls.run_jit_functions_eagerly,
    rng.track_the_cpu_generator,
    literals.allocate_token_counts_on_cpu,
    literals.return_l2_norm_on_cpu,
    literals.clip_cpu_gradients,
    literals.leave_rope_indices_unpinned,
    literals.accept_cpu_parameters,
    literals.accept_cpu_shards,
    offloaded_optimizer.offload_cpu_parameters,
    collectives.convert_split_sizes,
    collectives.emulate_uneven_collectives,
    collectives.leave_gradients_of_one_rank,
    literals.compare_metadata_on_cpu,
)
"""Let megatron-core compute on CPU tensors and gloo process groups; left out if there is a GPU."""

_applied: list[str] = []


def patches(*, cuda: bool, transformer_engine: bool) -> tuple[Patch, ...]:
    """The patches for a machine with or without a GPU, and with or without Transformer Engine."""
    engine = WITH_TRANSFORMER_ENGINE if transformer_engine else WITHOUT_TRANSFORMER_ENGINE
    return ANY_DEVICE + engine + (() if cuda else CPU_ONLY)


def apply() -> list[str]:
    """Patch the installed megatron-core; a second call does nothing.

    Returns:
        Names of the applied patches, in order.

    Raises:
        RuntimeError: another version is installed, or a source line that a patch replaces has changed.
        ValueError: Transformer Engine is installed and cannot be imported.
    """
    device.load_transformer_engine()
    import_megatron()
    import megatron.core

    version = megatron.core.__version__.partition("+")[0]
    if version != VERSION:
        raise RuntimeError(f"megatron-core {version} is installed; the patches are for {VERSION}")
    if not _applied:
        for patch in patches(cuda=device.device_type() == "cuda", transformer_engine=device.has_transformer_engine()):
            patch()
            _applied.append(patch.__name__)
    return list(_applied)
