"""megatron-core's own GPTModel, saved as megatron-core saves it, in a process that imports nothing of slimrl's trainer.

All that is changed is what its code asks of CUDA where there is no GPU.
"""

import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

LAYERS, HIDDEN, HEADS, GROUPS, DIM, EXPERTS, WIDE, VOCAB = 3, 32, 4, 2, 16, 4, 24, 96


def stock_model(experts: bool, moe_layer_freq: int | list[int]):
    """megatron-core's GPTModel with random weights, by its documented functions."""
    parallel_state.initialize_model_parallel()
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"
    moe = {
        "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": WIDE, "moe_layer_freq": moe_layer_freq,
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather",
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM,
        ffn_hidden_size=48, add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        normalization="RMSNorm", layernorm_epsilon=1e-6, qk_layernorm=True, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, **(moe if experts else {}),
    )  # fmt: skip
    if isinstance(moe_layer_freq, int):
        number = EXPERTS if experts else None
        spec = get_gpt_layer_local_spec(num_experts=number, qk_layernorm=True, normalization="RMSNorm")
    else:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=64, position_embedding_type="rope", rotary_base=10_000,
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
    return model.eval()


def save_stock(port: int, folders: dict[str, tuple], weights_file: Path) -> None:
    """Save a checkpoint of each kind, and their weights as the modules hold them, by the kind's name, to a file."""
    assert not any(name.startswith(("megatron_patches", "slimrl.trainer")) for name in sys.modules)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    weights = {}
    for name, (folder, experts, moe_layer_freq, metadata) in folders.items():
        model = stock_model(experts, moe_layer_freq)
        folder.mkdir(parents=True)
        state = {"model": model.sharded_state_dict(metadata=metadata), "iteration": 10}
        dist_checkpointing.save(state, str(folder))
        weights[name] = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.save(weights, weights_file)
