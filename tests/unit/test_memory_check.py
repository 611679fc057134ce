"""Before a start without a GPU: whether engines and ranks fit into the machine, and how large engines' caches are."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slimrl import device
from slimrl.base.meeting_folder import pid_namespace
from slimrl.config.problems import Problem, RecipeError
from slimrl.config.schema.algorithm import AdvantageName, AlgorithmConfig
from slimrl.config.schema.credit import DynamicSamplingConfig, RefillMode
from slimrl.config.schema.model import ModelConfig
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig, RolloutMode
from slimrl.config.schema.trainer import LoraConfig, ParallelConfig, TrainerConfig
from slimrl.estimates.planner.engine import kv_bytes_per_token
from slimrl.estimates.planner.shape import Shape
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config, published_names
from slimrl.resync.ipc import stale_files
from slimrl.runtime.checks import memory_check, start_check

GIB = 1024**3
PARAMETERS = 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
"""Number of those of the model below, whose head is the embedding"""

MODEL = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def recipe_of(*, num_ranks=2, lora=0, parallel=None, precision=Precision.fp32, algorithm=None, **rollout) -> Recipe:
    settings = {"num_engines": 2, "prompts_per_step": 4, "samples_per_prompt": 8, "max_trajectory_tokens": 4096}
    return Recipe(
        model=ModelConfig(path="model"),
        trainer=TrainerConfig(
            num_ranks=num_ranks,
            precision=precision,
            lora=LoraConfig(rank=lora),
            parallel=parallel or ParallelConfig(),
        ),
        algorithm=algorithm or AlgorithmConfig(),
        rollout=RolloutConfig(**{**settings, **rollout}),
    )


def problems(monkeypatch, recipe, *, gib: float, command="train", kind="cpu") -> list[Problem]:
    monkeypatch.setattr(device, "device_type", lambda: kind)
    monkeypatch.setattr(memory_check, "get_system_memory", lambda: round(gib * GIB))
    monkeypatch.setattr(memory_check, "read_hf_config", lambda _: MODEL)
    monkeypatch.setattr(memory_check, "PROCESS_BYTES", 0)
    loaded = SimpleNamespace(
        recipe=recipe, command=command, problem=lambda key, message: Problem(key=key, message=message)
    )
    return memory_check.memory_problems(loaded)


def test_a_step_counts_its_trajectories_unless_those_of_others_run_among_them():
    assert recipe_of().step_trajectories == 32
    refill = DynamicSamplingConfig(refill=RefillMode.order, oversampling=1.3)
    assert recipe_of(algorithm=AlgorithmConfig(dynamic_sampling=refill)).step_trajectories == 6 * 8
    assert recipe_of(mode=RolloutMode.one_step_off).step_trajectories is None
    assert recipe_of(oversample=1.5).step_trajectories is None


@pytest.mark.parametrize("name", published_names())
def test_a_token_takes_as_much_cache_as_the_plan_says(name):
    config = published_config(name)
    model = family_of(config).megatron_config(config)
    assert 4 * model.cached_elements == kv_bytes_per_token(Shape.of(model), 1, 4)


def test_a_cache_that_the_machine_cannot_hold_is_refused_with_the_settings_to_lower(monkeypatch):
    # Of a token 2 layers x keys and values of 64 columns x 4 bytes; 32 trajectories of 4,096 tokens; two engines.
    caches = 2 * 32 * 4096 * 2 * 2 * 64 * 4 / GIB
    (problem,) = problems(monkeypatch, recipe_of(), gib=caches / 0.95 - 0.001)
    assert problem.key == "rollout.max_trajectory_tokens"
    for words in (
        f"KV caches {caches:.1f}",
        "A cache has 131,072 tokens",
        "rollout.max_concurrency_per_engine is 256, a step has 32 trajectories",
        "rollout.max_trajectory_tokens, 4,096. Lower one of these, or rollout.num_engines.",
    ):
        assert words in problem.message
    assert problems(monkeypatch, recipe_of(), gib=caches / 0.95 + 0.02) == []
    assert problems(monkeypatch, recipe_of(num_engines=1), gib=caches / 0.95 - 0.001) == []
    assert problems(monkeypatch, recipe_of(max_concurrency_per_engine=16), gib=caches / 0.95 - 0.001) == []
    # Steps that overlap may fill the whole of the engines' concurrency.
    (wide,) = problems(monkeypatch, recipe_of(mode=RolloutMode.one_step_off), gib=caches / 0.95 + 0.02)
    assert "A cache has 1,048,576 tokens" in wide.message
    # SGLang lowers a cache that is larger than its fraction of the memory.
    assert problems(monkeypatch, recipe_of(num_engines=1, sglang={"max_total_tokens": 10**9}), gib=1.0) == []
    assert problems(monkeypatch, recipe_of(sglang={"max_total_tokens": 10**9}), gib=1.0) != []


def test_only_what_a_command_starts_is_counted_and_nothing_on_a_gpu(monkeypatch):
    small = 0.0001
    assert [p.key for p in problems(monkeypatch, recipe_of(), gib=0.2, command="eval")] == [
        "rollout.max_trajectory_tokens"
    ]
    assert [p.key for p in problems(monkeypatch, recipe_of(), gib=small, command="sft")] == ["trainer.num_ranks"]
    assert problems(monkeypatch, recipe_of(), gib=small, kind="cuda") == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packs_bf16", [True, False])
def test_engines_hold_large_matrices_twice_in_the_dtypes_that_are_packed(monkeypatch, tied, packs_bf16):
    packed = (torch.float32, torch.bfloat16) if packs_bf16 else (torch.float32,)
    monkeypatch.setattr(memory_check, "packed_dtypes", lambda: packed)
    wide = {
        **MODEL,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": tied,
    }
    # Matrices of attention and the MLP in two layers, and the head. Those of keys and values would be small alone.
    large = 2 * (2 * 1024 * 1024 + 2 * 128 * 1024 + 3 * 1024 * 2048) + 1000 * 1024
    small = 2 * 2 * 1024 + 1024 + (0 if tied else 1000 * 1024)
    monkeypatch.setitem(globals(), "MODEL", wide)
    # Of a token 2 layers x keys and values of 128 columns; the smallest cache.
    cache = 16384 * 2 * 2 * 128
    for precision in (Precision.fp32, Precision.bf16):
        elements = (2 if packs_bf16 or precision is Precision.fp32 else 1) * large + small + cache
        recipe = recipe_of(num_engines=1, max_trajectory_tokens=64, precision=precision)
        needed = elements * precision.element_bytes / GIB / 0.95
        assert problems(monkeypatch, recipe, gib=1.001 * needed, command="eval") == []
        assert len(problems(monkeypatch, recipe, gib=0.999 * needed, command="eval")) == 1


def test_what_is_packed_of_a_model_is_what_its_engine_was_measured_to_pack():
    smollm2 = {
        **MODEL, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    }  # fmt: skip
    assert 4 * memory_check._packed(recipe_of(), smollm2) / 1024**2 == pytest.approx(513, abs=0.5)


@pytest.mark.parametrize(
    ("changed", "updated", "weights"),
    [
        # Weights and gradients of each of two ranks, and one set of moments.
        ({}, 2 * (4 + 4) + 8, 2 * 4),
        ({"num_ranks": 4, "parallel": ParallelConfig(tensor=2, pipeline=2)}, 4 + 4 + 8, 4),
        ({"precision": Precision.bf16}, 2 * (2 + 2) + 8 + 4, 2 * 2),
        ({"lora": 8}, 2 * 4, 2 * 4),
    ],
)
def test_ranks_hold_replicas_and_share_the_optimizer_if_they_update_anything(monkeypatch, changed, updated, weights):
    recipe = recipe_of(**changed)
    for command, of_parameter in (("sft", updated), ("export", weights)):
        needed = of_parameter * PARAMETERS / GIB / 0.95
        assert problems(monkeypatch, recipe, gib=1.001 * needed, command=command) == []
        (problem,) = problems(monkeypatch, recipe, gib=0.999 * needed, command=command)
        assert problem.key == "trainer.num_ranks"


@pytest.mark.parametrize(
    ("known", "shared_only", "asked"),
    [([], False, True), ([], True, False), ([Problem(key="steps", message="wrong")], False, False)],
)
def test_a_start_asks_for_this_machines_memory_if_it_is_here_and_nothing_else_is_wrong(
    monkeypatch, known, shared_only, asked
):
    too_much = Problem(key="trainer.num_ranks", message="too many")
    no_room = Problem(key="checkpoint.in_memory_every_steps", message="no room")
    for name in ("folder_problems", "model_problems", "teacher_problems"):
        monkeypatch.setattr(start_check, name, lambda loaded, **how: [])
    monkeypatch.setattr(start_check, "memory_problems", lambda loaded: [too_much])
    monkeypatch.setattr(start_check, "shared_memory_problems", lambda loaded: [no_room])
    if expected := [*known, *([too_much, no_room] if asked else [])]:
        with pytest.raises(RecipeError) as error:
            start_check.read_files(None, known, lambda loaded: "read", shared_only=shared_only)
        assert list(error.value.problems) == expected
    else:
        assert start_check.read_files(None, known, lambda loaded: "read", shared_only=shared_only) == "read"


@pytest.mark.parametrize(
    ("precision", "lora", "bytes_of_one"), [(Precision.fp32, 0, 16), (Precision.bf16, 0, 14), (Precision.bf16, 8, 2)]
)
def test_copies_in_memory_count_and_need_their_room_in_shared_memory(monkeypatch, precision, lora, bytes_of_one):
    recipe = recipe_of(precision=precision, lora=lora)
    problems(monkeypatch, recipe, gib=100)
    assert memory_check.copies_bytes(recipe, 1, with_critic=False) == 0
    recipe.checkpoint.in_memory_every_steps = 5
    needed = 2 * bytes_of_one * PARAMETERS
    assert [memory_check.copies_bytes(recipe, count, with_critic=False) for count in (1, 3)] == [needed, 2 * needed]
    loaded = SimpleNamespace(
        recipe=recipe, command="train", problem=lambda key, message: Problem(key=key, message=message)
    )
    monkeypatch.setattr(memory_check, "shared_memory_free", lambda: needed)
    assert memory_check.shared_memory_problems(loaded) == []
    monkeypatch.setattr(memory_check, "shared_memory_free", lambda: needed - 1)
    (problem,) = memory_check.shared_memory_problems(loaded)
    assert problem.key == "checkpoint.in_memory_every_steps"
    assert "take at least 0.0 GiB of /dev/shm, and there are 0.0 GiB free" in problem.message
    for command in ("eval", "train --trajectories"):
        loaded.command = command
        assert memory_check.shared_memory_problems(loaded) == []


@pytest.mark.parametrize("tied", [True, False])
def test_copies_in_memory_have_all_of_a_critic_but_the_head_of_the_model(monkeypatch, tied):
    recipe = recipe_of(precision=Precision.bf16, lora=8, algorithm=AlgorithmConfig(advantage=AdvantageName.gae))
    recipe.critic.trainer.precision = Precision.fp32
    recipe.checkpoint.in_memory_every_steps = 1
    monkeypatch.setattr(memory_check, "read_hf_config", lambda _: {**MODEL, "tie_word_embeddings": tied})
    of_policy = PARAMETERS + (0 if tied else 1000 * 64)
    needed = 2 * (2 * of_policy + 16 * PARAMETERS)
    assert memory_check.copies_bytes(recipe, 1, with_critic=True) == needed
    monkeypatch.setattr(memory_check, "shared_memory_free", lambda: needed - 1)
    loaded = SimpleNamespace(
        recipe=recipe, command="train", problem=lambda key, message: Problem(key=key, message=message)
    )
    assert len(memory_check.shared_memory_problems(loaded)) == 1
    loaded.command = "sft"
    assert memory_check.shared_memory_problems(loaded) == []


def test_copies_in_memory_are_memory_of_the_machine(monkeypatch):
    recipe = recipe_of(num_engines=1, num_ranks=1, precision=Precision.bf16, sglang={"max_total_tokens": 1})
    recipe.checkpoint.in_memory_every_steps = 1
    (problem,) = problems(monkeypatch, recipe, gib=0.001, kind="cpu")
    copies = 2 * 14 * PARAMETERS / GIB
    assert problem.key == "checkpoint.in_memory_every_steps"
    assert f"copies of checkpoints {copies:.1f}" in problem.message
    assert [p.key for p in problems(monkeypatch, recipe, gib=0.001, command="eval")] != [problem.key]


def test_what_a_killed_run_left_in_shared_memory_takes_no_room(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stale_files, "SHARED_MEMORY_DIR", tmp_path)
    # No process has so large a number.
    left = tmp_path / f"slimrl-checkpoints_a@{pid_namespace()}-{2**22 + 1}-0"
    own = tmp_path / f"slimrl-checkpoints_b@{pid_namespace()}-{os.getpid()}-0"
    for folder in (left, own):
        (folder / "step_000001").mkdir(parents=True)
    assert memory_check.shared_memory_free() > 0
    assert list(tmp_path.iterdir()) == [own]
