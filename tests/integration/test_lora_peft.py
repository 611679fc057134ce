"""A model with adapters is the one that transformers and PEFT make of its export: logits, gradients, merged weights."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lora_cases import LINEAR_STEPS, LORA, LoraRun
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import save_file
from small_models import num_experts, small_model
from trainer_cases import packed_batches, sequences, token_cross_entropy, trainer_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from weight_cases import join
from wrapped_models import wrapped_model

from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.models.hf_config import read_hf_config
from slimrl.models.peft_config import peft_config
from slimrl.trainer.lora.attach import without_adapters
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEP = 7


def logprobs(worker: TrainerWorker, budget_tokens: int) -> dict[int, np.ndarray]:
    """Sequence -> log-probs of its targets that count, else 0, on this rank."""
    batches = packed_batches(STEP, worker.layout, budget_tokens)
    found = {}
    for batch, output in zip(batches, worker.runner.compute_logprobs(batches, 1.0), strict=True):
        for index, trajectory in enumerate(batch.trajectories):
            found[int(trajectory)] = output.logprobs[(batch.trajectory_ids == index) & ~batch.padding]
    return found


def train_and_export(rank, num_ranks, port, path, out, layout, lora=LORA):
    """Log-probs with and without the adapters, by sequence, of a model that made three updates and was exported."""
    optimizer = OptimizerConfig(lr=3e-2)
    trainer = trainer_config(num_ranks, **layout, lora=lora, optimizer=optimizer)
    worker = TrainerWorker(
        trainer, Path(path), seed=1, rank=rank, world_size=num_ranks, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=3,
    )  # fmt: skip
    worker.load_hf()
    for step in range(3):
        batches = packed_batches(step, worker.layout, trainer.max_tokens_per_rank)
        worker.runner.train_update(batches, token_cross_entropy, denominator=100.0, temperature=1.0)
    worker.export_hf(Path(out))
    adapted = logprobs(worker, trainer.max_tokens_per_rank)
    with without_adapters(worker.chunks):
        base = logprobs(worker, trainer.max_tokens_per_rank)
    worker.close()
    return adapted, base


@torch.no_grad()
def transformers_logprobs(model) -> dict[int, np.ndarray]:
    """As `logprobs`."""
    found = {}
    for number, segment in enumerate(sequences(STEP)[0]):
        tokens_T = torch.tensor(segment.tokens)
        logits_TV = model.eval()(tokens_T[None]).logits[0, :-1].float()
        logprobs_T = logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].numpy()
        found[number] = np.where(segment.loss_mask[1:], logprobs_T, 0)
    return found


def assert_equal_logprobs(by_rank, expected):
    ours = {number: values for part in by_rank for number, values in part.items()}
    assert ours.keys() == expected.keys()
    for number, values in expected.items():
        np.testing.assert_allclose(ours[number][: len(values)], values, atol=1e-5)


MORE_FAMILIES = [
    "deepseek_v3",
    "qwen3",
    "glm4_moe",
    "minimax_m2",
    "olmoe",
    "moonlight",
    "deepseek_v32",
    "qwen3_next_mixed",
    "qwen3_5",
    "gpt_oss",
    "qwen3_moe_mixed",
]


@pytest.mark.parametrize("name", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.full) for name in MORE_FAMILIES)])
def test_peft_loads_the_exported_adapters_and_computes_what_the_trainer_does(tmp_path, name):
    path, out = small_model(name, tmp_path / "model"), tmp_path / "out"
    layout = {"expert": 2} if num_experts(name) else {}
    parts = run_ranks(train_and_export, 2, str(path), str(out), layout, timeout_s=200)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert_equal_logprobs([base for _, base in parts], before := transformers_logprobs(base))
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert_equal_logprobs([adapted for adapted, _ in parts], after := transformers_logprobs(merged))
    assert max(abs(after[number] - before[number]).max() for number in after) > 0.05
    loaded = PeftModel.from_pretrained(base, out / "adapter")
    assert_equal_logprobs([adapted for adapted, _ in parts], transformers_logprobs(loaded))


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
WRAPPED_CASES = [
    ("qwen3_vl", ("all-linear",)),
    ("qwen3_vl_moe", ATTENTION),
    ("qwen3_5_wrapped", ("all-linear",)),
    ("qwen3_5_moe_wrapped", ATTENTION),
    ("kimi_k25", LATENT),
]
"""Kind of a wrapped model, and targets. PEFT does not know the experts of these models."""


@pytest.mark.parametrize(
    ("name", "targets"),
    [case if case[0] == "qwen3_vl" else pytest.param(*case, marks=pytest.mark.full) for case in WRAPPED_CASES],
)
def test_peft_loads_the_adapters_of_a_wrapped_model_into_transformers_multimodal_class(tmp_path, name, targets):
    path, out = wrapped_model(name, tmp_path / "model"), tmp_path / "out"
    lora = replace(LORA, targets=list(targets))
    parts = run_ranks(train_and_export, 2, str(path), str(out), {}, lora, timeout_s=200)
    base = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    assert_equal_logprobs([base for _, base in parts], before := transformers_logprobs(base))
    merged = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    assert_equal_logprobs([adapted for adapted, _ in parts], after := transformers_logprobs(merged))
    assert max(abs(after[number] - before[number]).max() for number in after) > 0.05
    loaded = PeftModel.from_pretrained(base, out / "adapter")
    assert_equal_logprobs([adapted for adapted, _ in parts], transformers_logprobs(loaded))


def one_update(rank, num_ranks, port, path):
    """The adapters before and after an update whose steps follow from the gradient."""
    join(rank, num_ranks, port)
    run = LoraRun(Path(path))
    before = run.adapters()
    run.update(0)
    after = run.adapters()
    dist.destroy_process_group()
    return before, after


def gradient(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The first step of Adam is lr * g / (|g| + eps)."""
    moved = (before.astype(np.float64) - after) / LINEAR_STEPS.lr
    return LINEAR_STEPS.eps * moved / (1 - abs(moved))


def peft_gradients(model, experts: int) -> dict[str, np.ndarray]:
    """Under the names of the export. PEFT stacks the adapters of a layer's experts, and those of gate and up."""
    found, rank = {}, LORA.rank
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        name, grad = name.replace(".default", ""), parameter.grad.numpy()
        before, in_experts, kind = name.partition(".mlp.experts.")
        if not in_experts:
            found[name] = grad
            continue
        layers = ("gate_proj", "up_proj") if kind.startswith("base_layer.") else ("down_proj",)
        for number, layer in enumerate(layers):
            ranks = slice(number * rank, (number + 1) * rank)
            rows = slice(number * len(grad) // len(layers), (number + 1) * len(grad) // len(layers))
            for expert in range(experts):
                if kind.endswith("lora_A.weight"):
                    value = grad.reshape(experts, len(layers) * rank, -1)[expert, ranks]
                else:
                    value = grad.reshape(len(grad), len(layers) * rank, experts)[rows, ranks, expert]
                found[f"{before}.mlp.experts.{expert}.{layer}.{kind.removeprefix('base_layer.')}"] = value
    return found


@pytest.mark.parametrize(
    "name", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.full) for name in ("deepseek_v3", "gpt_oss"))]
)
def test_every_adapter_gets_the_gradient_that_peft_gives_it(tmp_path, name):
    path, folder = small_model(name, tmp_path / "model"), tmp_path / "adapter"
    ((before, after),) = run_ranks(one_update, 1, str(path))
    folder.mkdir()
    save_file({key: torch.from_numpy(value) for key, value in before.items()}, folder / "adapter_model.safetensors")
    config = peft_config(LORA, before, read_hf_config(path), str(path))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder, is_trainable=True).eval()
    loss = torch.zeros(())
    for segment in sequences(0)[0]:
        tokens_T, mask_T = torch.tensor(segment.tokens), torch.tensor(segment.loss_mask)
        logprobs_TV = (model(tokens_T[None]).logits[0, :-1] / 0.7).log_softmax(-1)
        loss = loss - logprobs_TV.gather(1, tokens_T[1:, None])[mask_T[1:]].sum() / 100.0
    loss.backward()
    expected = peft_gradients(model, num_experts(name))
    assert expected.keys() == before.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(gradient(before[key], after[key]), value, atol=1e-5, err_msg=key)
    assert min(abs(value).max() for value in expected.values()) > 1e-4
