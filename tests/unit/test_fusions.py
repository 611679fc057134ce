"""Fused kernels: on where their packages are, off on a CPU, and a recipe's own value wins."""

import pytest

from slimrl import device
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.models.megatron_config import MegatronModelConfig
from slimrl.trainer import fusions
from slimrl.trainer.build import transformer_config

KERNELS = ("apply_rope_fusion", "moe_permute_fusion", "gradient_accumulation_fusion")


def machine(monkeypatch: pytest.MonkeyPatch, *, cuda: bool, engine: bool, kernels: bool, apex: bool) -> None:
    """Makes this one look so: a GPU, Transformer Engine, its newer kernels, and apex's."""
    kernel = object() if kernels else None
    monkeypatch.setattr(device, "device_type", lambda: "cuda" if cuda else "cpu")
    monkeypatch.setattr(device, "has_transformer_engine", lambda: engine)
    monkeypatch.setattr(fusions.rope_utils, "fused_apply_rotary_pos_emb", kernel)
    monkeypatch.setattr(fusions.rope_utils, "fused_apply_rotary_pos_emb_thd", kernel)
    for name in fusions.PERMUTE_KERNELS:
        monkeypatch.setattr(fusions.moe_utils, name, kernel)
    monkeypatch.setattr(fusions.layers, "_grad_accum_fusion_available", apex)


def model(*, latent: bool = False) -> MegatronModelConfig:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 4}
    return MegatronModelConfig(
        transformer=sizes,
        multi_latent_attention=latent,
        vocab_size=128,
        max_position=64,
        rotary_base=10000,
        rotary_percent=1.0,
        tie_embeddings=False,
    )


def found(*, latent: bool = False, **megatron: bool) -> list[bool]:
    trainer = TrainerConfig(precision=Precision.fp32, megatron={"add_bias_linear": False, **megatron})
    config = transformer_config(trainer, model(latent=latent))
    return [getattr(config, name) for name in KERNELS]


def test_each_is_on_where_its_package_is(monkeypatch: pytest.MonkeyPatch):
    machine(monkeypatch, cuda=True, engine=True, kernels=True, apex=True)
    assert found() == [True, True, True]
    assert found(latent=True) == [False, True, True]
    assert found(apply_rope_fusion=False, moe_permute_fusion=False) == [False, False, True]
    machine(monkeypatch, cuda=True, engine=True, kernels=False, apex=False)
    assert found() == [False, False, False]
    machine(monkeypatch, cuda=True, engine=False, kernels=False, apex=True)
    assert found() == [False, False, True]


def test_none_is_on_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    assert found() == [False, False, False]
    machine(monkeypatch, cuda=False, engine=False, kernels=True, apex=True)
    assert found() == [False, False, False]
