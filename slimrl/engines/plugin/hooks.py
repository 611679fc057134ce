"""What slimrl adds to an SGLang engine, by SGLang's own plugin mechanism (entry-point group sglang.srt.plugins).

On every device: weights from a shared buffer (weight_updates.py) or from a version in a folder (version_loader.py),
fingerprints of the loaded weights (weight_fingerprints.py), the load of its schedulers, the version of a token that a
pause in place leaves unread, sleep while paused, and one answer of several schedulers (scheduler.py), norms of gated
delta nets in the engine's precision (norm_dtype.py), OLMoE's norms over the heads of all ranks (olmoe_norms.py),
derived weights of a draft model (draft_weights.py), the check of the run's key (key_check.py), the same for sockets
between its processes (socket_keys.py), and no files of SGLang left in /dev/shm: they are unlinked early, or named so
that slimrl removes them.
Without a GPU in addition: batched attention and experts, latent attention, norms and rotary embeddings in fewer
operations, products with packed weights, gates, seeded sampling without a compiler, no pinning of host memory, no
padding of heads, and sums that NCCL would scatter. No file of SGLang is changed.
SGLang imports this module in every engine process. A hook that does not fit is only logged there; `require_applied`
turns it into a failure to start.
"""

from collections.abc import Callable
from typing import Any

Hook = tuple[str, str, Callable[..., Any]]

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_SPARSE = "sglang.srt.configs.model_config.is_deepseek_dsa"
_LATENT = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_FROM_DISK = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_CHECKER = "sglang.srt.utils.weight_checker.WeightChecker"
_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PAUSED_ROUND = f"{_SCHEDULER}._record_scheduler_state_for_paused_engine"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.common"
_LOAD_FILE = "sglang.srt.managers.load_snapshot.shm_path_for"
_KEY_CHECK = "sglang.srt.utils.auth.add_api_key_middleware"
_SOCKET = "zmq.sugar.socket.Socket"
_QUEUE_READY = "sglang.srt.distributed.device_communicators.shm_broadcast.MessageQueue.wait_until_ready"
_DELTA_NET = "sglang.srt.models.qwen3_next.Qwen3GatedDeltaNet"
_DELTA_NET_3_5 = "sglang.srt.models.qwen3_5.Qwen3_5GatedDeltaNet"
_GLM_DRAFT = "sglang.srt.models.glm4_moe_lite_nextn.Glm4MoeLiteForCausalLMNextN"
_HY_DRAFT = "sglang.srt.models.hunyuan_v3_nextn.HYV3ForCausalLMNextN"
_LOADER = "sglang.srt.model_loader.loader.DefaultModelLoader"
_NORM = "sglang.srt.layers.layernorm.RMSNorm"
_ROTARY = "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding"
_GATED_NORM = "sglang.kernels.ops.attention.fla.fused_norm_gate"
_GATED_NORM_3_5 = "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm"
_SHARED_EXPERT = "sglang.srt.models.qwen2_moe"
_RANKS = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_UNALIGNED = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
_OLMOE_ATTENTION = "sglang.srt.models.olmoe.OlmoeAttention"
_MINIMAX_NORMS = "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm"
_GPT_OSS = "sglang.srt.models.gpt_oss.GptOss"
_MODEL_ADJUSTMENTS = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
_LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod"
_LM_HEAD = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
_SAMPLER = "sglang.srt.layers.sampler"
_SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"


def after_wait_until_ready(result: None, queue: Any) -> None:
    """Hook of MessageQueue.wait_until_ready: unlink the shared memory in which rank 0 tells the others what to do.

    The writer returns from it when every reader has mapped the memory. SGLang unlinks it in a destructor, which does
    not run in a process that a signal ends: 25 MB of /dev/shm would stay behind of each engine of several ranks.
    """
    if queue._is_writer and queue.n_local_reader:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False


def _no_pinning(buffer: Any, granularity: int | None = None) -> None:
    """Replaces cudaHostRegister, which the buffer of routed experts calls on every device."""


def _load_file(instance_id: str) -> str:
    """Replaces shm_path_for, the file of load figures between an engine's processes, which SGLang never removes.

    The name has the engine's main process, the leader of its session, so slimrl removes the file when that has ended.
    """
    from slimrl.resync.ipc.stale_files import session_file

    return str(session_file("loads"))


def hooks() -> list[Hook]:
    """(target, kind of hook, function) for this process's device."""
    import torch

    from slimrl.engines.plugin import (
        draft_weights,
        key_check,
        norm_dtype,
        olmoe_norms,
        read_weights,
        scheduler,
        socket_keys,
        spans,
        version_loader,
        weight_fingerprints,
        weight_updates,
    )

    common: list[Hook] = [
        (f"{_UPDATER}._update_weights_from_flattened_bucket", "around", weight_updates.around_update),
        (f"{_UPDATER}.end_weight_update", "around", weight_updates.around_end_update),
        (f"{_FROM_DISK}.update_weights_from_disk", "around", version_loader.around_update_from_disk),
        (f"{_CHECKER}.handle", "around", weight_fingerprints.around_handle),
        (f"{_STATE}.get_internal_state", "after", scheduler.after_get_internal_state),
        (f"{_DELTA_NET}.__init__", "after", norm_dtype.after_init),
        (f"{_GPT_OSS}Model.__init__", "before", norm_dtype.before_gpt_oss),
        (f"{_OLMOE_ATTENTION}.__init__", "after", olmoe_norms.after_init),
        (f"{_DELTA_NET_3_5}.__init__", "after", norm_dtype.after_init_float32),
        (_PAUSED_ROUND, "after", scheduler.after_paused_round),
        (f"{_GLM_DRAFT}.post_load_weights", "around", draft_weights.around_post_load),
        (f"{_SCHEDULER}.init_idle_sleeper", "after", scheduler.after_init_idle_sleeper),
        (f"{_SCHEDULER}._add_request_to_queue", "after", scheduler.after_add_request_to_queue),
        (f"{_SCHEDULER}.record_weight_version_change", "around", scheduler.around_version_change),
        (f"{_CONTROLLER}.event_loop", "replace", scheduler.event_loop),
        (f"{_CONTROL}.flush_cache", "replace", scheduler.flush_cache),
        (_LOAD_FILE, "replace", _load_file),
        (_KEY_CHECK, "replace", key_check.add_key_check),
        (f"{_SOCKET}.bind", "before", socket_keys.before_bind),
        (f"{_SOCKET}.connect", "before", socket_keys.before_connect),
        (_QUEUE_READY, "after", after_wait_until_ready),
        (f"{_LOADER}._get_weights_iterator", "around", read_weights.around_weights_iterator),
        *spans.span_hooks(),
    ]
    if torch.cuda.is_available():
        return common
    from slimrl.engines.plugin.cpu import (
        attention_data_parallel,
        batched_attention,
        batched_experts,
        draft_embedding,
        gates,
        head_padding,
        heads_norm,
        latent_attention,
        native_layers,
        packed_linear,
        seeded_sampling,
        sinks,
        sparse_attention,
    )

    return [
        *common,
        (f"{_HOST_POOL}._cuda_host_register", "replace", _no_pinning),
        (_UNALIGNED, "around", head_padding.around_adjust_config),
        (f"{_BACKEND}.__init__", "after", batched_attention.after_init),
        (f"{_RANKS}.reduce_scatterv", "replace", attention_data_parallel.reduce_scatterv),
        (f"{_BACKEND}.init_forward_metadata", "after", batched_attention.after_init_forward_metadata),
        (f"{_BACKEND}._run_sdpa_forward_decode", "around", batched_attention.around_decode),
        (f"{_BACKEND}._run_sdpa_forward_extend", "around", batched_attention.around_extend),
        (f"{_BACKEND}.forward_decode", "around", sinks.around_forward),
        (f"{_BACKEND}.forward_extend", "around", sinks.around_forward),
        (f"{_GPT_OSS}Attention.__init__", "after", sinks.after_init),
        (_MODEL_ADJUSTMENTS, "around", sinks.around_adjustments),
        (_SPARSE, "replace", sparse_attention.is_deepseek_dsa),
        (f"{_LATENT}.__init__", "after", sparse_attention.after_init),
        (f"{_LATENT}.dispatch_attn_forward_method", "after", latent_attention.after_dispatch),
        ("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", "around", latent_attention.around_rope),
        ("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", "around", batched_experts.around_forward),
        (f"{_MINIMAX_NORMS}.forward", "replace", heads_norm.forward),
        (f"{_HY_DRAFT}.set_embed_and_head", "replace", draft_embedding.set_embed_and_head),
        (f"{_NORM}.forward_native", "around", native_layers.around_rms_norm),
        (f"{_ROTARY}.forward_native", "around", native_layers.around_rotary),
        (f"{_LINEAR}.apply", "around", packed_linear.around_apply),
        (_LM_HEAD, "around", packed_linear.around_lm_head),
        *((f"{_UPDATER}.{method}", "before", packed_linear.before_update) for method in packed_linear.UPDATES),
        (f"{_GATED_NORM}.rms_norm_gated", "replace", gates.rms_norm_gated),
        (f"{_GATED_NORM_3_5}.forward", "replace", gates.gated_norm),
        (f"{_SHARED_EXPERT}.fused_gate_sigmoid_mul_add", "replace", gates.fused_gate_sigmoid_mul_add),
        (f"{_SAMPLER}.multinomial_with_seed", "replace", seeded_sampling.multinomial_with_seed),
        (f"{_SAMPLER}.sampling_from_probs_torch", "replace", seeded_sampling.sampling_from_probs),
        (f"{_SAMPLING_INFO}.from_schedule_batch", "after", seeded_sampling.after_from_schedule_batch),
    ]


def register() -> None:
    """Register the hooks with SGLang; the entry point of the plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, kind, function in hooks():
        HookRegistry.register(target, function, HookType(kind))


def require_applied() -> None:
    """Raises RuntimeError naming the hooks that are not in place in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(target for target, _, _ in hooks() if target not in HookRegistry._patched)
    if missing:
        raise RuntimeError(f"SGLang lacks what slimrl hooks into: {', '.join(missing)}")
