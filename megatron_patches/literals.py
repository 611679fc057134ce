"""Places where megatron-core spells the device as "cuda"."""

from megatron_patches.respell import respell

CUDA_TO_CPU = ("device='cuda'", "device='cpu'")
CUDA_TO_CPU_DOUBLE = ('device="cuda"', 'device="cpu"')


def respell_schedules() -> None:
    """pipeline_parallel/schedules.py:596, 983, 2138: the token count of a step is allocated on "cuda"."""
    module = "megatron.core.pipeline_parallel.schedules"
    respell(module, "forward_backward_no_pipelining", (*CUDA_TO_CPU_DOUBLE, 1))
    respell(module, "forward_backward_pipelining_with_interleaving", (*CUDA_TO_CPU_DOUBLE, 1))
    respell(module, "forward_backward_pipelining_without_interleaving", (*CUDA_TO_CPU_DOUBLE, 1))


def respell_l2_norm() -> None:
    """utils.py:1207: the norm that gradient clipping uses without Transformer Engine and Apex returns on "cuda"."""
    respell("megatron.core.utils", "local_multi_tensor_l2_norm", (*CUDA_TO_CPU_DOUBLE, 1))


def respell_clip_grads() -> None:
    """optimizer/clip_grads.py:90-115, 167, 174, 207: buffers on "cuda", and a gradient's dtype told by type string."""
    module = "megatron.core.optimizer.clip_grads"
    respell(module, "get_grad_norm_fp32", (*CUDA_TO_CPU, 3))
    types = ("'torch.cuda.FloatTensor'", "'torch.FloatTensor'", 1)
    respell(module, "clip_grad_by_total_norm_fp32", types, (*CUDA_TO_CPU, 1))
    respell(module, "count_zeros_fp32", (*CUDA_TO_CPU, 1))


def respell_moe_logging() -> None:
    """transformer/moe/moe_utils.py:998: the tracker of auxiliary losses is allocated on "cuda"."""
    respell("megatron.core.transformer.moe.moe_utils", "track_moe_metrics", (*CUDA_TO_CPU_DOUBLE, 1))


def respell_rope_chunk_indices() -> None:
    """models/common/embeddings/rope_utils.py:63: pinning memory raises without an accelerator."""
    module = "megatron.core.models.common.embeddings.rope_utils"
    respell(module, "get_pos_emb_on_this_cp_rank", (", pin_memory=True", "", 1))
