"""Builds Megatron modules from a recipe and a model config, wrapped for mixed precision and data parallelism."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import nn

from megatron_patches.heads_norm import norm_over_heads
from slimrl import device
from slimrl.config.alignment import round_up
from slimrl.config.fp8_training import megatron_fp8
from slimrl.config.schema.precision import Fp8Scaling, Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.trainer.fp8_emulation import emulate_fp8
from slimrl.trainer.fusions import fusions
from slimrl.trainer.mtp import GptWithMtp, mtp_block_spec
from slimrl.trainer.passthrough import converted, fields_for
from slimrl.trainer.value_head import attach_value_head
from slimrl.trainer.yarn import YarnConfig

LOCAL_LAYERS = {"transformer_impl": "local", "moe_grouped_gemm": False}
"""Fields of TransformerConfig for Megatron's own layers."""
ENGINE_LAYERS = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
"""Fields of TransformerConfig for Transformer Engine's layers."""


def padded_vocab(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding: the smallest multiple of the tensor-parallel size that holds the vocabulary."""
    return round_up(vocab_size, tensor)


def build_model(
    trainer: TrainerConfig,
    model: MegatronModelConfig,
    *,
    mtp: bool = False,
    critic: bool = False,
    adapt: Callable[[GPTModel], None] = lambda chunk: None,
) -> list[DistributedDataParallel]:
    """This rank's model chunks (one, or `virtual_pipeline` of them), randomly initialised and ready to train.

    Args:
        mtp: with the model's layers for multi-token prediction, on the last pipeline stage (trainer/mtp.py).
        critic: with values in place of logits.
        adapt: changes each chunk before it is wrapped, for example by adapters.

    Raises:
        ValueError: see `transformer_config`; or this GPU lacks kernels for it.
    """
    check_kernels(trainer)
    config = transformer_config(trainer, model, mtp=mtp)
    if critic:
        # Its head defers no gradient.
        config.defer_embedding_wgrad_compute = False
        # The last pipeline stage needs no copy of the embedding.
        model = replace(model, tie_embeddings=False)
    chunks = []
    for index in range(trainer.parallel.virtual_pipeline or 1):
        chunk: Any = _gpt(trainer.parallel, model, config, index)
        if critic:
            attach_value_head(chunk)
        if trainer.fp8_emulation:
            emulate_fp8(chunk, config, trainer.fp8)
        if not config.dsa_indexer_loss_coeff:
            _freeze_indexers(chunk)
        chunk.to(device.compute_device())
        adapt(chunk)
        if trainer.precision == Precision.bf16:
            chunk = Float16Module(config, chunk)
            _keep_routers_float32(chunk, weights=model.float32_router)
        _mark_experts(chunk)
        _mark_sinks(chunk)
        chunks.append(DistributedDataParallel(config, ddp_config(trainer), chunk, disable_bucketing=index > 0))
    for chunk in chunks:
        chunk.broadcast_params()
    if ddp_config(trainer).overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = functions if len(chunks) > 1 else functions[0]
    config.finalize_model_grads_func = finalize_model_grads
    return chunks


def check_kernels(trainer: TrainerConfig) -> None:
    """Raises ValueError if Transformer Engine cannot train so on this GPU."""
    if problem := device.attention_problem():
        raise ValueError(problem)
    if not trainer.fp8_emulation and (problem := device.fp8_problem(trainer.fp8)):
        raise ValueError(f"trainer.fp8: {problem}")


def build_local_chunk(
    parallel: ParallelConfig,
    model: MegatronModelConfig,
    *,
    mtp: bool,
    index: int = 0,
    megatron: Mapping[str, Any] | None = None,
) -> GPTModel:
    """Build one chunk of this rank's weights as an uninitialised, unwrapped bfloat16 module, to inspect its shapes.

    It has Megatron's local layers on every machine. Checkpoints store them under the same keys as Transformer
    Engine's.

    Args:
        index: of the chunk; a rank has several with virtual pipelining.
        megatron: further fields of `trainer.megatron`.
    """
    trainer = TrainerConfig(
        parallel=parallel,
        precision=Precision.bf16,
        max_tokens_per_rank=1,
        optimizer=OptimizerConfig(lr=0.0),
        # Grouped experts need kernels that may be missing; checkpoints store them like single ones.
        megatron={**(megatron or {}), "perform_initialization": False, **LOCAL_LAYERS},
    )
    return _gpt(parallel, model, transformer_config(trainer, model, mtp=mtp), index)


def unwrap(chunk: nn.Module) -> GPTModel:
    """The GPTModel inside the wrappers of `build_model`."""
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def transformer_config(trainer: TrainerConfig, model: MegatronModelConfig, *, mtp: bool = False) -> TransformerConfig:
    """Megatron's model configuration: model family, layout, precision, then `trainer.megatron`.

    Args:
        mtp: with the model's layers for multi-token prediction.

    Raises:
        ValueError: the settings are impossible, for example FP8 without Transformer Engine; or megatron-core refuses
            them.
    """
    kind: type[TransformerConfig] = MLATransformerConfig if model.multi_latent_attention else TransformerConfig
    if "yarn_rotary_scaling_factor" in model.transformer:
        kind = YarnConfig
    user = fields_for(TransformerConfig, trainer.megatron)
    if trainer.fp8_emulation and device.has_transformer_engine():
        raise ValueError("trainer.fp8_emulation: rounds around Megatron's own layers, not Transformer Engine's")
    if trainer.fp8 is not Fp8Scaling.off and not (trainer.fp8_emulation or device.has_transformer_engine()):
        raise ValueError("trainer.fp8: FP8 training needs a GPU and Transformer Engine, or trainer.fp8_emulation: true")
    family = converted(kind, model.transformer)
    if mtp and model.mtp_layers:
        # Detached, they have a gradient norm of their own.
        family |= {"mtp_num_layers": model.mtp_layers, "mtp_detach_heads": True}
    if model.sparse_attention:
        # The only exchange of context parallelism that sparse attention has.
        user.setdefault("cp_comm_type", "allgather")
    family.setdefault("activation_func", torch.nn.functional.silu)
    dtype = getattr(torch, trainer.precision.dtype)
    precision = {"bf16": dtype is torch.bfloat16, "params_dtype": dtype, "pipeline_dtype": dtype}
    try:
        defaults = _defaults(latent_attention=model.multi_latent_attention, engine=takes_engine_layers(trainer))
        return kind(**{**defaults, **family, **_layout(trainer.parallel), **precision, **megatron_fp8(trainer), **user})
    except AssertionError as error:
        raise ValueError(f"trainer.parallel, trainer.megatron: megatron-core refuses them: {error}") from error


def ddp_config(trainer: TrainerConfig) -> DistributedDataParallelConfig:
    """Gradients are reduced in float32; the optimizer step handles a NaN by skipping the update."""
    user = fields_for(DistributedDataParallelConfig, trainer.megatron)
    ours = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": trainer.optimizer.distributed,
        "check_for_nan_in_grad": False,
    }
    return DistributedDataParallelConfig(**{**ours, **user})


def takes_engine_layers(trainer: TrainerConfig) -> bool:
    """Whether linear layers and norms are Transformer Engine's here; Megatron's own ones take adapters."""
    return device.has_transformer_engine() and not trainer.lora.rank


def _defaults(*, latent_attention: bool, engine: bool) -> dict[str, Any]:
    """Defaults of slimrl: packed sequences, per-token loss, fused kernels where available.

    Args:
        engine: with Transformer Engine's layers.
    """
    return {
        "calculate_per_token_loss": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        # The expert bias stays as in the checkpoint, so trainer and engines route alike.
        "moe_router_bias_update_rate": 0.0,
        **(ENGINE_LAYERS if engine else LOCAL_LAYERS),
        "persist_layer_norm": False,
        **fusions(latent_attention=latent_attention),
    }


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    interleaved = parallel.virtual_pipeline is not None and parallel.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline if interleaved else None,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        # Packed micro-batches differ in length, so pipeline stages must send the length.
        "variable_seq_lengths": parallel.pipeline > 1,
        # Two interleaved stages send in both directions at once, which would mix up batched operations.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _gpt(parallel: ParallelConfig, model: MegatronModelConfig, config: TransformerConfig, index: int) -> GPTModel:
    stage = index if config.virtual_pipeline_model_parallel_size is not None else None
    place: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
    engine = config.transformer_impl == "transformer_engine"
    spec = get_gpt_decoder_block_spec(config, engine, normalization=config.normalization, vp_stage=stage)
    if model.qk_norm_over_heads:
        norm_over_heads(spec)
    mtp = mtp_block_spec(config, spec, engine, stage) if config.mtp_num_layers else None
    return (GptWithMtp if config.mtp_num_layers else GPTModel)(
        config,
        spec,
        vocab_size=padded_vocab(model.vocab_size, parallel.tensor),
        max_sequence_length=model.max_position,
        pre_process=mpu.is_pipeline_first_stage(**place),
        post_process=mpu.is_pipeline_last_stage(**place),
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_embeddings,
        position_embedding_type="yarn" if isinstance(config, YarnConfig) else "rope",
        rotary_base=model.rotary_base,
        rotary_percent=model.rotary_percent,
        rope_scaling=model.llama3_rope_factor is not None,
        rope_scaling_factor=model.llama3_rope_factor or 1.0,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )


def _keep_routers_float32(chunk: nn.Module, *, weights: bool) -> None:
    """Keep the expert bias and the token counts in float32: bfloat16 counts exactly only up to 256.

    Megatron restores only the bias, and only at the first forward pass, when its digits are lost.

    Args:
        weights: the routers' weights too.
    """
    for module in chunk.modules():
        if not isinstance(module, TopKRouter):
            continue
        if weights:
            module.weight.data = module.weight.data.float()
        if module.enable_expert_bias:
            module.expert_bias = module.expert_bias.float()
            module.local_tokens_per_expert = module.local_tokens_per_expert.float()


def _freeze_indexers(chunk: nn.Module) -> None:
    """Leave indexers of sparse attention as they are: only a loss of their own gives them a gradient."""
    for name, parameter in chunk.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad = False


def _mark_experts(chunk: nn.Module) -> None:
    """Mark expert parameters, so their gradients are reduced over the expert-data-parallel group.

    Megatron marks them only where that group differs from the data-parallel one. The marks also group the optimizer's
    state in a checkpoint, which could not be loaded under another layout if they came and went.
    Megatron's own layers mark biases of experts as if tensor-parallel ranks shared their tokens' gradients, which that
    group already sums.
    """
    for name, parameter in chunk.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.sequence_parallel = False  # type: ignore[attr-defined]


def _mark_sinks(chunk: nn.Module) -> None:
    """Mark the sinks of attention as sharded, so that the gradient norm counts those of every tensor-parallel rank.

    No implementation of attention marks them.
    """
    for name, parameter in chunk.named_parameters():
        if name.endswith(".core_attention.softmax_offset"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
