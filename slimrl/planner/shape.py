"""The sizes of a model that memory and work follow from, out of what its family tells the trainer."""

from dataclasses import dataclass

from slimrl.models.megatron_config import MegatronModelConfig


@dataclass(frozen=True, kw_only=True)
class Shape:
    hidden: int
    heads: int
    query_columns: int
    """Of one head; those of its keys are as many."""
    value_columns: int
    kv_heads: int
    """Heads with keys and values of their own; with multi-latent attention all of them, once projected up."""
    query_latent: int
    """Columns of the latent queries; 0 where there are none."""
    kv_latent: int
    """Columns of the latent keys and values; 0 without multi-latent attention."""
    rotary_columns: int
    """Of the rotated key that all heads share, beside the latent."""
    qk_norm: bool
    """Whether queries and keys of a head are normed; the norms of latents are not meant."""
    dense_columns: int
    """Inner columns of a layer without experts."""
    expert_columns: int
    shared_columns: int
    experts: int
    topk: int
    sparse: tuple[bool, ...]
    """By layer: whether it has experts."""
    vocab: int

    @property
    def layers(self) -> int:
        return len(self.sparse)

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
            vocab=model.vocab_size,
        )
