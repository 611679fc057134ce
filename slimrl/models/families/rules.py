"""Rules that families share: embeddings, attention, MLPs, experts and norms.

Each function gives the rules of one part of a layer, for the layers of a LayerPrefix. Sizes come from the Hugging Face
config. A rule may name the tensor as Megatron's local layers spell it and as Transformer Engine's do.
"""

from dataclasses import dataclass
from typing import Any, Literal

from slimrl.models.hf_config import head_dim, required
from slimrl.models.layout_ops import GateUp, GroupedQKV, Identity, LayoutOp
from slimrl.models.weight_map import HfTensor, Rule, Shard

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
"""Usual names of the three matrices of a gated MLP."""


@dataclass(frozen=True, kw_only=True)
class LayerPrefix:
    """Prefixes of the names of layers' tensors on both sides, with `{layer}` if there are several layers."""

    megatron: str
    hf: str
    layers: tuple[int, ...] | None


def decoder(layers: tuple[int, ...]) -> LayerPrefix:
    """Prefixes of these layers of the model itself, without those for multi-token prediction."""
    return LayerPrefix(megatron="decoder.layers.{layer}.", hf="model.layers.{layer}.", layers=layers)


def all_layers(hf_config: dict[str, Any]) -> tuple[int, ...]:
    return tuple(range(int(required(hf_config, "num_hidden_layers"))))


def embedding_rule(hf_config: dict[str, Any], padded_vocab_size: int | None, copies: tuple[str, ...] = ()) -> Rule:
    """Rule of the embedding. If it is tied, the last pipeline stage holds the same tensor under the name of the output
    layer.

    Args:
        copies: further Hugging Face names of the embedding.
    """
    shape = (required(hf_config, "vocab_size"), required(hf_config, "hidden_size"))
    tied = ("output_layer.weight",) if hf_config.get("tie_word_embeddings") else ()
    return Rule(
        megatron=("embedding.word_embeddings.weight", *tied),
        hf=(HfTensor(name="model.embed_tokens.weight", shape=shape, copies=copies),),
        shard=Shard(dim=0, padded_size=padded_vocab_size),
    )


def head_rules(hf_config: dict[str, Any], padded_vocab_size: int | None, copies: tuple[str, ...] = ()) -> list[Rule]:
    """The final norm, and the output layer unless it is tied; `copies`: further names of the output layer."""
    vocab, hidden = required(hf_config, "vocab_size"), required(hf_config, "hidden_size")
    norm = Rule(megatron=("decoder.final_layernorm.weight",), hf=(HfTensor(name="model.norm.weight", shape=(hidden,)),))
    if hf_config.get("tie_word_embeddings"):
        return [norm]
    head = Rule(
        megatron=("output_layer.weight",),
        hf=(HfTensor(name="lm_head.weight", shape=(vocab, hidden), copies=copies),),
        shard=Shard(dim=0, padded_size=padded_vocab_size),
    )
    return [norm, head]


def dense_decoder_rules(
    hf_config: dict[str, Any], padded_vocab_size: int | None, *, bias: bool, qk_norm: bool
) -> list[Rule]:
    """All rules of a dense model with grouped-query attention; for the flags see attention_rules."""
    prefix = decoder(all_layers(hf_config))
    return [
        embedding_rule(hf_config, padded_vocab_size),
        *attention_rules(hf_config, prefix, bias=bias, qk_norm=qk_norm),
        mlp_norm_rule(hf_config, prefix),
        *mlp_rules(hf_config, prefix),
        *head_rules(hf_config, padded_vocab_size),
    ]


def attention_rules(
    hf_config: dict[str, Any],
    prefix: LayerPrefix,
    *,
    bias: bool,
    qk_norm: bool,
    norm_over_heads: bool = False,
    gated: bool = False,
) -> list[Rule]:
    """Grouped-query attention with its input norm.

    Args:
        bias: of the query, key and value projections.
        qk_norm: an RMSNorm over queries and one over keys, each head's by itself.
        norm_over_heads: these norms are over all heads together.
        gated: the query projection also gives a gate of each head's output.
    """
    hidden, heads = required(hf_config, "hidden_size"), required(hf_config, "num_attention_heads")
    groups = hf_config.get("num_key_value_heads") or heads
    dim = head_dim(hf_config)
    megatron, hf = prefix.megatron + "self_attention.", prefix.hf + "self_attn."
    rows = {"q_proj": (2 if gated else 1) * heads * dim, "k_proj": groups * dim, "v_proj": groups * dim}

    def qkv(kind: str, *tail: int) -> Rule:
        return Rule(
            megatron=(f"{megatron}linear_qkv.{kind}",),
            hf=tuple(HfTensor(name=f"{hf}{name}.{kind}", shape=(size, *tail)) for name, size in rows.items()),
            op=GroupedQKV(heads // groups, dim, gated),
            shard=Shard(dim=0),
            layers=prefix.layers,
            quantizable=kind == "weight",
        )

    rules = [input_norm_rule(hf_config, prefix, fused_into="self_attention.linear_qkv"), qkv("weight", hidden)]
    if bias:
        rules.append(qkv("bias"))
    if qk_norm:
        normed = {"q": heads * dim, "k": groups * dim} if norm_over_heads else {"q": dim, "k": dim}
        rules += [
            norm_rule((f"{megatron}{name}_layernorm.weight",), f"{hf}{name}_norm.weight", size, prefix)
            for name, size in normed.items()
        ]
    return [*rules, output_projection_rule(hidden, heads * dim, prefix)]


def output_projection_rule(hidden: int, inner: int, prefix: LayerPrefix) -> Rule:
    """The projection from all heads' outputs, `inner` wide, back to the hidden size."""
    return Rule(
        megatron=(prefix.megatron + "self_attention.linear_proj.weight",),
        hf=(HfTensor(name=prefix.hf + "self_attn.o_proj.weight", shape=(hidden, inner)),),
        shard=Shard(dim=1),
        layers=prefix.layers,
        quantizable=True,
    )


def input_norm_rule(hf_config: dict[str, Any], prefix: LayerPrefix, *, fused_into: str | None) -> Rule:
    """The norm before attention; Transformer Engine fuses it into the projection `fused_into`, if not None."""
    fused = () if fused_into is None else (f"{prefix.megatron}{fused_into}.layer_norm_weight",)
    names = (prefix.megatron + "input_layernorm.weight", *fused)
    return norm_rule(names, prefix.hf + "input_layernorm.weight", required(hf_config, "hidden_size"), prefix)


def mlp_norm_rule(hf_config: dict[str, Any], prefix: LayerPrefix) -> Rule:
    """The norm after attention, before a dense MLP or experts."""
    names = (prefix.megatron + "pre_mlp_layernorm.weight", prefix.megatron + "mlp.linear_fc1.layer_norm_weight")
    return norm_rule(names, prefix.hf + "post_attention_layernorm.weight", required(hf_config, "hidden_size"), prefix)


def norm_rule(megatron: tuple[str, ...], hf: str, size: int, prefix: LayerPrefix) -> Rule:
    return Rule(megatron=megatron, hf=(HfTensor(name=hf, shape=(size,)),), layers=prefix.layers)


def mlp_rules(hf_config: dict[str, Any], prefix: LayerPrefix) -> list[Rule]:
    """The dense MLP, `intermediate_size` wide."""
    hidden, wide = required(hf_config, "hidden_size"), required(hf_config, "intermediate_size")
    return _gated_mlp_rules(hidden, wide, prefix, (prefix.megatron + "mlp.{linear}.weight",), prefix.hf + "mlp.")


def shared_expert_rules(hidden: int, wide: int, prefix: LayerPrefix, *, hf_name: str = "shared_experts") -> list[Rule]:
    """The shared experts, as one MLP of their joint width."""
    name = prefix.megatron + "mlp.shared_experts.{linear}.weight"
    return _gated_mlp_rules(hidden, wide, prefix, (name,), f"{prefix.hf}mlp.{hf_name}.")


def expert_rules(
    hidden: int,
    wide: int,
    experts: int,
    prefix: LayerPrefix,
    *,
    hf_name: str = "mlp.experts",
    matrices: tuple[str, str, str] = GATE_UP_DOWN,
) -> list[Rule]:
    """The routed experts, each `wide`.

    Args:
        hf_name: what Hugging Face calls them in a layer.
        matrices: and the three matrices of each: gate, up and down.
    """
    local = prefix.megatron + "mlp.experts.local_experts.{expert}.{linear}.weight"
    grouped = prefix.megatron + "mlp.experts.{linear}.weight{expert}"
    hf = f"{prefix.hf}{hf_name}.{{expert}}."
    return _gated_mlp_rules(
        hidden, wide, prefix, (local, grouped), hf, matrices=matrices, group="expert_tensor", num_experts=experts
    )


def _gated_mlp_rules(
    hidden: int,
    wide: int,
    prefix: LayerPrefix,
    megatron: tuple[str, ...],
    hf: str,
    *,
    matrices: tuple[str, str, str] = GATE_UP_DOWN,
    group: Literal["tensor", "expert_tensor"] = "tensor",
    num_experts: int | None = None,
) -> list[Rule]:
    """A gated MLP. `megatron`: names with {linear} for its two linears; `hf`: prefix of gate, up and down."""
    gate_up = tuple(HfTensor(name=f"{hf}{name}.weight", shape=(wide, hidden)) for name in matrices[:2])
    down = HfTensor(name=f"{hf}{matrices[2]}.weight", shape=(hidden, wide))

    def rule(linear: str, tensors: tuple[HfTensor, ...], op: LayoutOp, dim: int) -> Rule:
        return Rule(
            megatron=tuple(name.replace("{linear}", linear) for name in megatron),
            hf=tensors,
            op=op,
            shard=Shard(dim=dim, group=group),
            layers=prefix.layers,
            num_experts=num_experts,
            quantizable=True,
        )

    return [rule("linear_fc1", gate_up, GateUp(), 0), rule("linear_fc2", (down,), Identity(), 1)]


def router_rules(
    hidden: int,
    experts: int,
    prefix: LayerPrefix,
    *,
    hf_name: str = "mlp.gate.weight",
    bias: str | None,
    dtype: str | None = None,
) -> list[Rule]:
    """The router.

    Args:
        hf_name: what Hugging Face calls its weight in a layer.
        bias: and the expert bias, which balances load and stays in float32; None without one.
        dtype: of the weight in every checkpoint; None for that of the others.
    """
    weight = Rule(
        megatron=(prefix.megatron + "mlp.router.weight",),
        hf=(HfTensor(name=prefix.hf + hf_name, shape=(experts, hidden), dtype=dtype),),
        layers=prefix.layers,
    )
    if bias is None:
        return [weight]
    return [
        weight,
        Rule(
            megatron=(prefix.megatron + "mlp.router.expert_bias",),
            hf=(HfTensor(name=prefix.hf + bias, shape=(experts,), dtype="float32"),),
            layers=prefix.layers,
        ),
    ]
