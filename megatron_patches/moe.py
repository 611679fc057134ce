"""Mixture-of-Experts layers: split sizes, names that Transformer Engine would bring, the auxiliary loss."""

from typing import Any

import torch

from megatron_patches.respell import rebind, respell


def convert_split_sizes() -> None:
    """transformer/moe/moe_utils.py:1093 turns split sizes into numpy if they lie on a GPU alone.

    The all-to-all of the token dispatcher (tensor_parallel/mappings.py:442) needs them as numbers on any device.
    """
    from megatron.core.transformer.moe import moe_utils

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    rebind(moe_utils, "maybe_move_tensor_to_cpu", move)


def name_missing_transformer_engine() -> None:
    """Two modules misjudge the absence of Transformer Engine.

    transformer/moe/moe_utils.py:1192 reads `te_general_gemm`, which the failed import at line 30 leaves undefined: a
    NameError as soon as moe_router_dtype is set. transformer/multi_latent_attention.py:62 takes the mock that
    extensions/transformer_engine.py:76 puts in its place for the real thing: a TypeError at line 185.
    """
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    absent: Any = None
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = absent
        multi_latent_attention.HAVE_TE = False


def scale_aux_loss_by_its_group() -> None:
    """transformer/moe/router.py:471: under a per-token loss the auxiliary loss is scaled by this rank's tokens alone.

    Its weight then shrinks by the number of tensor- and context-parallel ranks, on any device.
    """
    respell(
        "megatron.core.transformer.moe.router",
        "TopKRouter.attach_and_log_load_balancing_loss",
        ("aux_loss * num_tokens", "aux_loss * num_tokens * self.tp_cp_group.size()", 1),
    )
