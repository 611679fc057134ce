"""Qwen3, the dense family; its attention and its frame are Qwen3-MoE's too."""

from typing import Any

from slimrl.models.hf_config import head_dim, required, rope_theta
from slimrl.models.layout_ops import GateUp, GroupedQKV
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import HfTensor, Rule, Shard, WeightMap

LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def megatron_config(hf_config: dict[str, Any]) -> MegatronModelConfig:
    """Raises ValueError for a config whose attention or activation is not Qwen3's."""
    _refuse_variants(hf_config)
    heads = int(required(hf_config, "num_attention_heads"))
    transformer = dict(
        num_layers=int(required(hf_config, "num_hidden_layers")),
        hidden_size=int(required(hf_config, "hidden_size")),
        ffn_hidden_size=int(required(hf_config, "intermediate_size")),
        num_attention_heads=heads,
        num_query_groups=int(hf_config.get("num_key_value_heads") or heads),
        kv_channels=head_dim(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=float(required(hf_config, "rms_norm_eps")),
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func="silu",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return MegatronModelConfig(
        transformer=transformer,
        multi_latent_attention=False,
        vocab_size=int(required(hf_config, "vocab_size")),
        rotary_base=rope_theta(hf_config),
        rotary_percent=1.0,
        tie_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        max_position=int(required(hf_config, "max_position_embeddings")),
    )


def weight_map(hf_config: dict[str, Any], padded_vocab_size: int | None) -> WeightMap:
    layers = tuple(range(required(hf_config, "num_hidden_layers")))
    return WeightMap(
        [
            embedding_rule(hf_config, padded_vocab_size),
            *attention_rules(hf_config, layers),
            *mlp_rules(hf_config, layers),
            *head_rules(hf_config, padded_vocab_size),
        ]
    )


def embedding_rule(hf_config: dict[str, Any], padded_vocab_size: int | None) -> Rule:
    """With tied embeddings the last pipeline stage holds the same tensor under the name of the output layer."""
    shape = (required(hf_config, "vocab_size"), required(hf_config, "hidden_size"))
    tied = ("output_layer.weight",) if hf_config.get("tie_word_embeddings") else ()
    return Rule(
        megatron=("embedding.word_embeddings.weight", *tied),
        hf=(HfTensor(name="model.embed_tokens.weight", shape=shape),),
        shard=Shard(dim=0, padded_size=padded_vocab_size),
    )


def head_rules(hf_config: dict[str, Any], padded_vocab_size: int | None) -> list[Rule]:
    vocab, hidden = required(hf_config, "vocab_size"), required(hf_config, "hidden_size")
    norm = Rule(megatron=("decoder.final_layernorm.weight",), hf=(HfTensor(name="model.norm.weight", shape=(hidden,)),))
    if hf_config.get("tie_word_embeddings"):
        return [norm]
    head = Rule(
        megatron=("output_layer.weight",),
        hf=(HfTensor(name="lm_head.weight", shape=(vocab, hidden)),),
        shard=Shard(dim=0, padded_size=padded_vocab_size),
    )
    return [norm, head]


def attention_rules(hf_config: dict[str, Any], layers: tuple[int, ...]) -> list[Rule]:
    """Attention with its input norm, and the norm behind it."""
    hidden, heads = required(hf_config, "hidden_size"), required(hf_config, "num_attention_heads")
    groups = hf_config.get("num_key_value_heads") or heads
    dim = head_dim(hf_config)
    local, hf = LAYER + "self_attention.", HF_LAYER + "self_attn."

    def norm(names: tuple[str, ...], hf_name: str, size: int) -> Rule:
        return Rule(megatron=names, hf=(HfTensor(name=hf_name, shape=(size,)),), layers=layers)

    return [
        norm(
            (LAYER + "input_layernorm.weight", local + "linear_qkv.layer_norm_weight"),
            HF_LAYER + "input_layernorm.weight",
            hidden,
        ),
        Rule(
            megatron=(local + "linear_qkv.weight",),
            hf=(
                HfTensor(name=hf + "q_proj.weight", shape=(heads * dim, hidden)),
                HfTensor(name=hf + "k_proj.weight", shape=(groups * dim, hidden)),
                HfTensor(name=hf + "v_proj.weight", shape=(groups * dim, hidden)),
            ),
            op=GroupedQKV(heads // groups, dim),
            shard=Shard(dim=0),
            layers=layers,
        ),
        norm((local + "q_layernorm.weight",), hf + "q_norm.weight", dim),
        norm((local + "k_layernorm.weight",), hf + "k_norm.weight", dim),
        Rule(
            megatron=(local + "linear_proj.weight",),
            hf=(HfTensor(name=hf + "o_proj.weight", shape=(hidden, heads * dim)),),
            shard=Shard(dim=1),
            layers=layers,
        ),
        norm(
            (LAYER + "pre_mlp_layernorm.weight", LAYER + "mlp.linear_fc1.layer_norm_weight"),
            HF_LAYER + "post_attention_layernorm.weight",
            hidden,
        ),
    ]


def mlp_rules(hf_config: dict[str, Any], layers: tuple[int, ...]) -> list[Rule]:
    """The dense MLP."""
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "intermediate_size")
    hf = HF_LAYER + "mlp."
    return [
        Rule(
            megatron=(LAYER + "mlp.linear_fc1.weight",),
            hf=(
                HfTensor(name=hf + "gate_proj.weight", shape=(wide, hidden)),
                HfTensor(name=hf + "up_proj.weight", shape=(wide, hidden)),
            ),
            op=GateUp(),
            shard=Shard(dim=0),
            layers=layers,
        ),
        Rule(
            megatron=(LAYER + "mlp.linear_fc2.weight",),
            hf=(HfTensor(name=hf + "down_proj.weight", shape=(hidden, wide)),),
            shard=Shard(dim=1),
            layers=layers,
        ),
    ]


def _refuse_variants(hf_config: dict[str, Any]) -> None:
    """The options of transformers' Qwen3 that no released Qwen3 uses and the rules below do not cover."""
    refused = {
        "hidden_act": hf_config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(hf_config.get("attention_bias")),
        "use_sliding_window": bool(hf_config.get("use_sliding_window")),
    }
    wrong = [f"{name}: {hf_config[name]!r}" for name, bad in refused.items() if bad]
    if wrong:
        raise ValueError(f"config.json: not supported for {hf_config.get('model_type')}: {', '.join(wrong)}")
