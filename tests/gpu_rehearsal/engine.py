"""An engine's start, up to what needs a device: as EngineServer starts it, through SGLang's own resolution."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_rehearsal.recipe import environment
from slimrl import device
from slimrl.config.hf_config import write_hf_config
from slimrl.config.schema.recipe import Recipe
from slimrl.config.wrapper import wrapper_of
from slimrl.engines.servers.server import engine_arguments, engine_environment
from slimrl.models.family import has_linear_attention
from slimrl.models.offline_recipe import OfflineRecipe


def rehearse_engine(
    planned: OfflineRecipe, hf_config: dict[str, Any], folder: Path, without: Collection[str] = ()
) -> dict[str, Any]:
    """What SGLang decides. Raises what it raises.

    Args:
        folder: empty; gets the model's config.json.
        without: flags to leave out of the command line.
    """
    recipe = planned.recipe
    # Of a wrapped model the whole config, by which SGLang takes its multimodal class.
    write_hf_config(folder, hf_config)
    with environment(engine_environment(recipe.rollout, precision=recipe.trainer.precision, cuda=True)):
        return _resolve(recipe, hf_config, folder, without)


def _resolve(recipe: Recipe, hf_config: dict[str, Any], folder: Path, without: Collection[str]) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    arguments = engine_arguments(
        recipe.rollout,
        folder,
        host="127.0.0.1",
        port=30000,
        precision=recipe.trainer.precision,
        cuda=True,
        seed=recipe.seed,
        dequantize="quantization_config" in hf_config and not device.computes_block_fp8(),
        plain=device.packs_engine_weights(),
        linear_attention=has_linear_attention(hf_config),
        wrapped=wrapper_of(hf_config) is not None,
        deterministic=recipe.deterministic,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    server = prepare_server_args([word for word in arguments if word not in without])
    server.resolve_once()
    server.check_server_args()
    _set_envs_and_config(server)
    publish(server, role="scheduler")
    decided = server.resolved_dict()
    quantized = "quantization_config" in hf_config and not decided["json_model_override_args"].strip("{}")
    return {
        **{name: decided[name] for name in ("moe_runner_backend", "fp8_gemm_runner_backend", "page_size")},
        "graphs": _graph_backends(server),
        "attention": _attention_backends(server, hf_config),
        "fp8": _fp8_kernels(hf_config["quantization_config"]) if quantized else [],
    }


def _attention_backends(server: Any, hf_config: dict[str, Any]) -> list[str]:
    """Classes of attention, each of which SGLang makes if the card suits it; their own constructors do nothing here."""
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    AttentionBackend.__init_subclass__ = classmethod(_without_constructor)
    runner = SimpleNamespace(
        use_mla_backend="kv_lora_rank" in hf_config,
        model_config=SimpleNamespace(is_encoder_decoder=False, hf_config=SimpleNamespace(**hf_config)),
        server_args=server,
        init_new_workspace=False,
        kv_cache_dtype=None,
    )
    return [type(ATTENTION_BACKENDS[name](runner)).__name__ for name in attention_backends_of(resolved_view(server))]


def _without_constructor(made: Any, **options: Any) -> None:
    made.__init__ = lambda self, *args, **kwargs: None


def _fp8_kernels(quantization: dict[str, Any]) -> list[str]:
    """Methods of linear layers and experts in block FP8, and the function of the former."""
    import torch
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config

    initialize_fp8_gemm_config()
    initialize_moe_config()
    config = Fp8Config.from_config(quantization)
    major, minor = torch.cuda.get_device_capability()
    assert config.get_min_capability() <= 10 * major + minor
    linear, experts = Fp8LinearMethod(config), Fp8MoEMethod(config)
    assert not linear.use_marlin  # It repacks weights, which a resync cannot update.
    function = getattr(linear.w8a8_block_fp8_linear, "func", linear.w8a8_block_fp8_linear)
    return [function.__name__, type(experts).__name__]


def _graph_backends(server: Any) -> dict[str, str]:
    """Phase -> class of the backend that captures its CUDA graphs, which SGLang makes as it captures the first."""
    import torch
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.runner_backend.utils import resolve_decode_backend, resolve_prefill_backend
    from sglang.srt.runtime_context import get_exec, get_parallel

    config = get_exec().graph.cuda_graph_config
    runner = SimpleNamespace(device_module=torch.cuda, model_runner=SimpleNamespace(device="cuda", server_args=server))
    found = {}
    with get_parallel().override(tp_group=None):
        for phase, resolve in (("decode", resolve_decode_backend), ("prefill", resolve_prefill_backend)):
            if config[phase].backend != Backend.DISABLED:
                found[phase] = type(resolve(runner)).__name__
    return found
