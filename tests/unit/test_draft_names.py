"""Names of draft models' parameters: what SGLang's loading makes of the checkpoint's names, inverted by hand."""

from types import SimpleNamespace

import pytest
from slimrl_tools.toy.toy_configs import ToySize, toy_config

from slimrl.models.draft import draft_specs, layer_name
from slimrl.models.engine_layout import engine_slices
from slimrl.models.engine_slice import EngineShape

MIXTURE = ["experts.w13_weight", "experts.w2_weight", "gate.weight"]
SIGMOID = [*MIXTURE, "gate.e_score_correction_bias", "shared_experts.gate_up_proj.weight"]
SIGMOID += ["shared_experts.down_proj.weight"]
SOFTMAX = [*MIXTURE, "shared_expert_gate.weight", "shared_expert.gate_up_proj.weight", "shared_expert.down_proj.weight"]
DENSE = ["gate_up_proj.weight", "down_proj.weight"]
HUNYUAN = [*MIXTURE, "expert_bias", "shared_mlp.gate_up_proj.weight", "shared_mlp.down_proj.weight"]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
LATENT = ["fused_qkv_a_proj_with_mqa", "q_a_layernorm", "q_b_proj", "kv_b_proj", "o_proj", "kv_a_layernorm"]
AROUND = ["model.enorm.weight", "model.hnorm.weight", "model.eh_proj.weight", "model.shared_head.norm.weight"]
SHARED = ["model.embed_tokens.weight", "lm_head.weight"]


def of_layer(layer: str, attention: list[str], mixture: list[str]) -> list[str]:
    return [*attention, *(f"{layer}.{name}" for name in NORMS), *(f"{layer}.mlp.{name}" for name in mixture)]


LATENT_NAMES = [f"model.decoder.self_attn.{name}.weight" for name in LATENT]
INDEXER = ("wq_b.weight", "wk.weight", "weights_proj.weight", "k_norm.weight", "k_norm.bias")
INDEXER_NAMES = [f"model.decoder.self_attn.indexer.{name}" for name in INDEXER]
GROUPED = ["qkv_proj.weight", "qkv_proj.bias", "o_proj.weight", "q_norm.weight", "k_norm.weight"]
UNBIASED_NAMES = [f"model.decoder.self_attn.{name}" for name in GROUPED if not name.endswith("bias")]
GROUPED_NAMES = [f"model.decoder.self_attn.{name}" for name in GROUPED]
GATED_NAMES = [f"model.layers.0.{name}.weight" for name in ("qkv_proj", "o_proj", "q_norm", "k_norm")]
OUTSIDE = ["fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "model.norm.weight"]

PARAMETERS = {
    "DeepseekV3ForCausalLMNextN": ("deepseek_v3", [*AROUND, *of_layer("model.decoder", LATENT_NAMES, SIGMOID)]),
    "Glm4MoeForCausalLMNextN": ("glm4_moe", [*AROUND, *of_layer("model.decoder", GROUPED_NAMES, SIGMOID)]),
    "Glm4MoeLiteForCausalLMNextN": ("glm4_moe_lite", [*AROUND, *of_layer("model.decoder", LATENT_NAMES, SIGMOID)]),
    "Qwen3_5ForCausalLMMTP": ("qwen3_5_moe", [*OUTSIDE, *of_layer("model.layers.0", GATED_NAMES, SOFTMAX)]),
    "Qwen3_5ForCausalLMMTP, dense": ("qwen3_5", [*OUTSIDE, *of_layer("model.layers.0", GATED_NAMES, DENSE)]),
    "GlmMoeDsaForCausalLMNextN": (
        "glm_moe_dsa",
        [*AROUND, *of_layer("model.decoder", [*LATENT_NAMES, *INDEXER_NAMES], SIGMOID)],
    ),
    "HYV3ForCausalLMNextN": ("hy_v3", [*AROUND, *of_layer("model.decoder", UNBIASED_NAMES, HUNYUAN)]),
    "Qwen3NextForCausalLMMTP": ("qwen3_next", [*OUTSIDE, *of_layer("model.layers.0", GATED_NAMES, SOFTMAX)]),
}
"""Class of a draft model -> family, and parameters of the model's one layer, in srt/models of SGLang."""


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_draft_model_holds_what_a_resync_sends_to_it_and_nothing_else(case):
    model_class, (family, parameters) = case.partition(",")[0], PARAMETERS[case]
    config = toy_config(family, ToySize(layers=4, mtp_layers=1)) | {"vocab_size": 128}
    held = SimpleNamespace(**config)
    slices = [
        piece
        for name in parameters
        for piece in engine_slices(layer_name(model_class, held, name), EngineShape.of_config(held, 1))
    ]
    sent = {spec.name for spec in draft_specs(config, "bfloat16")}
    assert {piece.hf_name for piece in slices} == sent
    assert [layer_name(model_class, held, name) for name in SHARED] == SHARED


def test_the_engines_model_keeps_its_names():
    assert layer_name("Qwen3NextForCausalLM", None, "model.layers.0.qkv_proj.weight") == (
        "model.layers.0.qkv_proj.weight"
    )
