"""Every change that slimrl makes to megatron-core: one function per patch, keyed by version, each saying why.

`apply()` is called before a Megatron module is built. A patch is one of two kinds: those that mend a fault on any
device, and those that let megatron-core run on CPU tensors and gloo process groups, which are left out where CUDA is
present. File and line numbers in the docstrings are those of megatron-core 0.16.1, below megatron/core.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_patches import (
    checkpointing,
    collectives,
    cuda_calls,
    layers,
    literals,
    moe,
    offloaded_optimizer,
    optimizer,
    rng,
)
from megatron_patches.first_import import import_megatron

Patch = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class PatchSet:
    """The patches of one megatron-core version."""

    any_device: tuple[Patch, ...]
    cpu_only: tuple[Patch, ...]


PATCHES = {
    "0.16.1": PatchSet(
        any_device=(
            layers.replicate_mla_down_projections,
            moe.scale_aux_loss_by_its_group,
            checkpointing.keep_results_in_process,
            offloaded_optimizer.start_offloaded_state_at_zero,
            offloaded_optimizer.keep_classes_out_of_offloaded_state,
        ),
        cpu_only=(
            cuda_calls.replace_torch_cuda,
            cuda_calls.make_cuda_moves_identity,
            cuda_calls.run_jit_functions_eagerly,
            rng.track_the_cpu_generator,
            literals.respell_schedules,
            literals.respell_l2_norm,
            literals.respell_clip_grads,
            literals.respell_moe_logging,
            literals.respell_rope_chunk_indices,
            optimizer.respell_mixed_precision,
            optimizer.respell_distributed,
            offloaded_optimizer.respell_offloading,
            moe.convert_split_sizes,
            moe.name_missing_transformer_engine,
            layers.accept_sequence_parallel_norms,
            layers.offer_core_attention,
            collectives.emulate_uneven_collectives,
            checkpointing.respell_metadata_check,
        ),
    ),
}
"""Which patches a megatron-core version needs."""

_applied: list[str] = []


def apply() -> list[str]:
    """Patch the installed megatron-core; a second call does nothing.

    Returns:
        Names of the patches in force, in the order of application.

    Raises:
        RuntimeError: the installed version has no patch set, or a source line that a patch replaces has changed.
    """
    import_megatron()
    import megatron.core

    version = megatron.core.__version__
    if version not in PATCHES:
        raise RuntimeError(f"megatron-core {version} is installed; patches exist for {', '.join(sorted(PATCHES))}")
    if not _applied:
        patches = PATCHES[version].any_device
        if not torch.cuda.is_available():
            patches += PATCHES[version].cpu_only
        for patch in patches:
            patch()
            _applied.append(patch.__name__)
    return list(_applied)
