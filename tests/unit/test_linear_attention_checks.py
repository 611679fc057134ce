"""A model with gated delta nets is refused, in one sentence, where its engines or its trainer cannot run."""

import json
from types import SimpleNamespace

import pytest

from slimrl import device
from slimrl.config.problems import Problem
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import TrainerConfig
from slimrl.runtime.checks.model_check import model_problems
from slimrl.toys.toy_configs import ToySize

SIZE = ToySize(layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, experts=2, moe_intermediate=16)


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_moe"])
def toy(request, tmp_path_factory):
    from slimrl_tools.toy.toy import write_toy

    path = tmp_path_factory.mktemp("toy") / request.param
    write_toy(request.param, path, SIZE, 0)
    return path


def problems(
    toy, command: str, *, devices: bool = True, deterministic: bool = False, sglang=None, **megatron
) -> list[str]:
    recipe = SimpleNamespace(
        rollout=RolloutConfig(sglang=sglang or {}),
        deterministic=deterministic,
        has_critic=False,
        model=SimpleNamespace(path=str(toy), megatron=None),
        trainer=TrainerConfig(megatron=megatron, precision=Precision.fp32),
        resync=SimpleNamespace(bucket_bytes=10**9, transport=TransportName.ipc),
    )
    loaded = SimpleNamespace(
        recipe=recipe,
        command=command,
        problem=lambda key, message: Problem(key=key, message=message),
    )
    return [f"{problem.key}: {problem.message}" for problem in model_problems(loaded, devices=devices)]


EVERY_COMMAND = ("train", "eval", "rollout", "resync bench", "sft", "train --trajectories", "export")


@pytest.mark.parametrize("command", EVERY_COMMAND)
def test_a_cpu_will_do(toy, command, monkeypatch):
    monkeypatch.setattr(device, "device_type", lambda: "cpu")
    assert problems(toy, command) == []


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("page_size", 16, 1),
        ("mamba_radix_cache_strategy", "extra_buffer", "auto"),
        ("disable_overlap_schedule", False, True),
    ],
)
def test_a_cache_of_states_that_sglang_has_on_gpus_alone_is_refused_without_one(toy, name, value, allowed, monkeypatch):
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(device, "attention_problem", lambda: None)
    said = (
        f"rollout.sglang.{name}: {value}: SGLang caches no states of a {toy.name} so on a CPU. Leave it out, or set "
        "rollout.sglang.disable_radix_cache."
    )
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    assert problems(toy, "rollout", sglang={name: value}) == []
    monkeypatch.setattr(device, "device_type", lambda: "cpu")
    for command in EVERY_COMMAND:
        serves = command in ("train", "eval", "rollout", "resync bench")
        assert problems(toy, command, sglang={name: value}) == [said] * (toy.name != "qwen3_moe" and serves)
    assert problems(toy, "rollout", sglang={name: value}, devices=False) == []
    assert problems(toy, "rollout", sglang={name: value, "disable_radix_cache": True}) == []
    assert problems(toy, "rollout", sglang={name: allowed}) == []


def test_a_gpu_needs_the_kernels_to_train_and_not_to_serve(toy, monkeypatch):
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(device, "computes_block_fp8", lambda: True)
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(device, "attention_problem", lambda: None)
    for kernels in (False, True):
        monkeypatch.setattr(device, "has_delta_net_kernels", lambda kernels=kernels: kernels)
        found = problems(toy, "train")
        assert bool(found) == (toy.name != "qwen3_moe" and not kernels)
        assert all("kernels of flash-linear-attention, which are not installed" in problem for problem in found)
        assert problems(toy, "rollout") == []


def test_deterministic_training_is_refused_where_megatron_would_fail_in_it(toy, monkeypatch):
    """Without a GPU nothing has to be switched for it, but Megatron's own field can be set."""
    delta_nets, said = toy.name != "qwen3_moe", "deterministic mode has no packed sequences in gated delta nets."
    for command in ("train --trajectories", "sft"):
        found = problems(toy, command, deterministic_mode=True)
        expected = f"trainer.megatron.deterministic_mode: megatron-core's {said} Leave it out."
        assert found == [expected] * delta_nets
        assert problems(toy, command, deterministic=True) == []
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(device, "attention_problem", lambda: None)
    monkeypatch.setattr(device, "has_delta_net_kernels", lambda: True)
    assert (
        problems(toy, "sft", deterministic=True) == [f"deterministic: megatron-core's {said} Use false."] * delta_nets
    )
    assert problems(toy, "rollout", deterministic=True, deterministic_mode=True) == []


@pytest.mark.parametrize(("command", "refused"), [("train", 1), ("eval", 1), ("sft", 0), ("export", 0)])
def test_a_config_that_sglang_would_misread_is_refused_where_engines_start(tmp_path, command, refused):
    from slimrl_tools.toy.toy import write_toy

    write_toy("qwen3_next", tmp_path / "toy", SIZE, 0)
    path = tmp_path / "toy" / "config.json"
    config = json.loads(path.read_text())
    theta = config.pop("rope_theta")
    path.write_text(json.dumps({**config, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}))
    found = problems(tmp_path / "toy", command, devices=False)
    assert len(found) == refused
    assert all(f"Set rope_theta: {theta} in config.json too." in problem for problem in found)
