"""A model's sizes that determine memory and work, from its family's Megatron configuration."""

from dataclasses import dataclass

from slimrl.models.megatron_config import MegatronModelConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int
    heads: int
    query_columns: int
    """Columns of one query head; keys have as many"""
    value_columns: int
    kv_heads: int
    """Number of heads of keys and values; with multi-latent attention all heads, after the up-projection"""
    query_latent: int
    """Columns of the latent queries; 0 without them"""
    kv_latent: int
    """Columns of the latent keys and values; 0 without multi-latent attention"""
    rotary_columns: int
    """Columns of the rotated key that all heads share, in addition to the latent"""
    qk_norm: bool
    """Whether queries and keys of a head are normed; the norms of latents do not count"""
    dense_columns: int
    """Intermediate size of a layer without experts"""
    expert_columns: int
    shared_columns: int
    experts: int
    topk: int
    sparse: tuple[bool, ...]
    """Whether each layer has experts."""
    linear: tuple[bool, ...]
    """Whether each layer is a gated delta net instead of attention"""
    vocab: int
    output_gate: bool = False
    """Whether attention's result is multiplied by a gate, which is as wide"""
    linear_keys: int = 0
    """Number of key heads of a gated delta net"""
    linear_values: int = 0
    """Number of value heads of a gated delta net, each with a state"""
    linear_key_columns: int = 0
    """Columns of one key head of a gated delta net"""
    linear_value_columns: int = 0
    linear_kernel: int = 0
    """Tokens that the convolution of a gated delta net sees"""

    @property
    def layers(self) -> int:
        return len(self.sparse)

    @property
    def attention_layers(self) -> int:
        """Number of layers with keys and values."""
        return self.layers - sum(self.linear)

    @classmethod
    def of(cls, model: MegatronModelConfig) -> "Shape":
        facts = model.transformer
        heads, head = int(facts["num_attention_heads"]), int(facts["kv_channels"])
        layers, experts = int(facts["num_layers"]), int(facts.get("num_moe_experts") or 0)
        latent = model.multi_latent_attention
        pattern = facts.get("moe_layer_freq", 1)
        if isinstance(pattern, int):
            pattern = [int(layer % pattern == 0) for layer in range(layers)]
        return cls(
            hidden=int(facts["hidden_size"]),
            heads=heads,
            query_columns=int(facts["qk_head_dim"]) + int(facts["qk_pos_emb_head_dim"]) if latent else head,
            value_columns=int(facts["v_head_dim"]) if latent else head,
            kv_heads=heads if latent else int(facts["num_query_groups"]),
            query_latent=int(facts.get("q_lora_rank") or 0) if latent else 0,
            kv_latent=int(facts["kv_lora_rank"]) if latent else 0,
            rotary_columns=int(facts["qk_pos_emb_head_dim"]) if latent else 0,
            qk_norm=bool(facts.get("qk_layernorm")) and not latent,
            dense_columns=int(facts["ffn_hidden_size"]),
            expert_columns=int(facts.get("moe_ffn_hidden_size") or 0) if experts else 0,
            shared_columns=int(facts.get("moe_shared_expert_intermediate_size") or 0),
            experts=experts,
            topk=int(facts.get("moe_router_topk") or 0) if experts else 0,
            sparse=tuple(bool(experts and flag) for flag in pattern),
            linear=tuple(map(bool, facts.get("linear_attention_freq") or [False] * layers)),
            vocab=model.vocab_size,
            output_gate=bool(facts.get("attention_output_gate")),
            linear_keys=int(facts.get("linear_num_key_heads") or 0),
            linear_values=int(facts.get("linear_num_value_heads") or 0),
            linear_key_columns=int(facts.get("linear_key_head_dim") or 0),
            linear_value_columns=int(facts.get("linear_value_head_dim") or 0),
            linear_kernel=int(facts.get("linear_conv_kernel_dim") or 0),
        )
