"""Model families: how a Hugging Face config becomes a Megatron model, and which weights it has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from slimrl.config.wrapper import WRAPPERS
from slimrl.data.model_weights import TensorSpec
from slimrl.models.engine_rules import NORM_OVER_HEADS
from slimrl.models.engine_slice import EngineRule
from slimrl.models.families import (
    deepseek_v3,
    deepseek_v32,
    delta_nets,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    hy_v3,
    llama,
    minimax_m2,
    olmoe,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from slimrl.models.families.mtp import DraftModel, numbered_layer_name
from slimrl.models.hf_config import dtype_name
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.models.weight_map import WeightMap


class FamilyModule(Protocol):
    """What a file of `families/` defines."""

    def megatron_config(self, hf_config: dict[str, Any]) -> MegatronModelConfig: ...

    @property
    def weight_map(self) -> Callable[..., WeightMap]:
        """Function of a Hugging Face config and the padded vocabulary, and of `mtp` if `has_mtp`, that gives the weight
        map."""
        ...


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    model_types: tuple[str, ...]
    """Values of `model_type` in config.json that belong to the family."""
    module: FamilyModule
    linear_attention: bool = False
    """Whether it has gated delta nets. Training on a GPU needs the package fla."""
    attention_groups: bool = True
    """Whether ranks of an engine of SGLang can share out requests (`rollout.engine_attention_dp`)."""
    unserved: Callable[[dict[str, Any]], str | None] = lambda hf_config: None
    """Function that says why SGLang would serve another model than a config describes, or None if it would not."""
    draft: DraftModel | None = None
    """SGLang's model of its layers for multi-token prediction; None if none of its models has any."""
    engine_rules: tuple[EngineRule, ...] = ()
    """What parameters of SGLang's model hold, where the rules that families share do not say it or are wrong."""
    call_parsers: tuple[str, ...]
    """Parsers of the calls that its models write, by their names in `agent.parser`; none if their chat template writes
    none. A model's is the first that reads what its chat template writes."""

    @property
    def has_mtp(self) -> bool:
        """Whether its models may have layers for multi-token prediction."""
        return self.draft is not None

    def megatron_config(self, hf_config: dict[str, Any]) -> MegatronModelConfig:
        """Megatron's configuration of a model. Raises ValueError naming what in the config is not supported."""
        return self.module.megatron_config(hf_config)

    def weight_map(
        self, hf_config: dict[str, Any], padded_vocab_size: int | None = None, *, mtp: bool = False
    ) -> WeightMap:
        """The weights of the model.

        Args:
            padded_vocab_size: rows of the vocabulary in Megatron; None for as many as in the Hugging Face checkpoint.
            mtp: with the layers for multi-token prediction, if the model has any.
        """
        options = {"mtp": mtp} if self.has_mtp else {}
        return self.module.weight_map(hf_config, padded_vocab_size, **options)

    def hf_tensor_specs(self, hf_config: dict[str, Any], *, mtp: bool = False) -> list[TensorSpec]:
        """Specs of all tensors of the checkpoint in export order, in the checkpoint's dtype."""
        return self.weight_map(hf_config, mtp=mtp).specs(dtype_name(hf_config))


FAMILIES = (
    Family(name="qwen3", model_types=("qwen3",), module=qwen3, call_parsers=("qwen25", "qwen3_coder")),
    Family(name="qwen3_moe", model_types=("qwen3_moe",), module=qwen3_moe, call_parsers=("qwen25", "qwen3_coder")),
    Family(name="qwen2", model_types=("qwen2",), module=qwen2, call_parsers=("qwen25", "hermes")),
    Family(name="llama", model_types=("llama",), module=llama, call_parsers=("llama3", "pythonic", "hermes")),
    Family(
        name="glm4_moe",
        model_types=("glm4_moe",),
        module=glm4_moe,
        draft=DraftModel(model_class="Glm4MoeForCausalLMNextN", layer_name=numbered_layer_name),
        call_parsers=("glm45", "glm47"),
    ),
    Family(
        name="glm4_moe_lite",
        model_types=("glm4_moe_lite",),
        module=glm4_moe_lite,
        draft=DraftModel(model_class="Glm4MoeLiteForCausalLMNextN", layer_name=numbered_layer_name),
        unserved=glm4_moe_lite.unserved,
        call_parsers=("glm47", "glm45"),
    ),
    Family(
        name="deepseek_v3",
        model_types=("deepseek_v3", "kimi_k2"),
        module=deepseek_v3,
        draft=DraftModel(model_class="DeepseekV3ForCausalLMNextN", layer_name=numbered_layer_name),
        unserved=deepseek_v3.unserved,
        call_parsers=("deepseekv31", "deepseekv3", "kimi_k2"),
    ),
    Family(
        name="hy_v3",
        model_types=("hy_v3",),
        module=hy_v3,
        draft=DraftModel(model_class="HYV3ForCausalLMNextN", layer_name=hy_v3.draft_layer_name),
        attention_groups=False,
        unserved=hy_v3.unserved,
        engine_rules=hy_v3.ENGINE_RULES,
        call_parsers=("hunyuan",),
    ),
    Family(
        name="minimax_m2",
        model_types=("minimax_m2",),
        module=minimax_m2,
        unserved=minimax_m2.unserved,
        engine_rules=minimax_m2.ENGINE_RULES,
        call_parsers=("minimax-m2",),
    ),
    Family(
        name="gpt_oss",
        model_types=("gpt_oss",),
        module=gpt_oss,
        engine_rules=gpt_oss.ENGINE_RULES,
        call_parsers=("harmony",),
    ),
    Family(
        name="deepseek_v32",
        model_types=("deepseek_v32",),
        module=deepseek_v32,
        draft=DraftModel(model_class="DeepseekV3ForCausalLMNextN", layer_name=numbered_layer_name),
        unserved=deepseek_v32.unserved,
        call_parsers=("deepseekv32",),
    ),
    Family(
        name="glm_moe_dsa",
        model_types=("glm_moe_dsa",),
        module=glm_moe_dsa,
        draft=DraftModel(model_class="GlmMoeDsaForCausalLMNextN", layer_name=numbered_layer_name),
        unserved=glm_moe_dsa.unserved,
        call_parsers=("glm47",),
    ),
    Family(
        name="olmoe",
        model_types=("olmoe",),
        module=olmoe,
        attention_groups=False,
        unserved=olmoe.unserved,
        engine_rules=(NORM_OVER_HEADS,),
        call_parsers=(),
    ),
    Family(
        name="qwen3_next",
        model_types=("qwen3_next",),
        module=qwen3_next,
        draft=DraftModel(model_class="Qwen3NextForCausalLMMTP", layer_name=delta_nets.draft_layer_name),
        linear_attention=True,
        unserved=qwen3_next.unserved,
        engine_rules=qwen3_next.ENGINE_RULES,
        call_parsers=("qwen25", "qwen3_coder"),
    ),
    *(
        Family(
            name=name,
            model_types=(model_type,),
            module=qwen3_5,
            draft=DraftModel(model_class="Qwen3_5ForCausalLMMTP", layer_name=delta_nets.draft_layer_name),
            linear_attention=True,
            unserved=qwen3_5.unserved,
            engine_rules=qwen3_5.ENGINE_RULES,
            call_parsers=("qwen3_coder", "qwen25"),
        )
        for name, model_type in (("qwen3_5", qwen3_5.DENSE), ("qwen3_5_moe", qwen3_5.WITH_EXPERTS))
    ),
)


_MODEL_TYPES = {name for family in FAMILIES for name in family.model_types}


def family_of(hf_config: dict[str, Any]) -> Family:
    """The family of a Hugging Face config.

    Raises:
        ValueError: its `model_type` is missing or not supported.
    """
    model_type = hf_config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted({*_MODEL_TYPES, *(wrapper.model_type for wrapper in WRAPPERS)}))
    raise ValueError(
        f"config.json: model_type {model_type!r} is not supported; known: {known}. docs/models.md says what stands in "
        "the way of some others, docs/adding_a_model.md how one is added"
    )


def is_of_a_family(hf_config: dict[str, Any]) -> bool:
    return hf_config.get("model_type") in _MODEL_TYPES


def has_linear_attention(hf_config: dict[str, Any]) -> bool:
    """Whether the model has gated delta nets; False for one that is not supported."""
    model_type = hf_config.get("model_type")
    return any(family.linear_attention and model_type in family.model_types for family in FAMILIES)


def engine_rules_of(model_type: str) -> tuple[EngineRule, ...]:
    """The rules of the family alone; none for one that is not supported."""
    return next((family.engine_rules for family in FAMILIES if model_type in family.model_types), ())
