"""A model with adapters is the one that transformers and PEFT make of its export: logits, gradients, merged weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from lora_cases import LORA
from peft import PeftModel
from ranks import run_ranks
from small_models import small_model
from trainer_cases import packed_batches, sequences, token_cross_entropy, trainer_config
from transformers import AutoModelForCausalLM

from slimrl.config.schema import OptimizerConfig
from slimrl.trainer.lora.attach import without_adapters
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

STEP = 7
DENOMINATOR, TEMPERATURE = 100.0, 0.7


def logprobs(worker: TrainerWorker) -> dict[int, np.ndarray]:
    """Of the targets of each sequence, on this rank."""
    batches = packed_batches(STEP, worker.layout, worker.trainer_tokens)
    found = {}
    for batch, output in zip(batches, worker.runner.compute_logprobs(batches, 1.0), strict=True):
        for index, trajectory in enumerate(batch.trajectories):
            found[int(trajectory)] = output.logprobs[(batch.trajectory_ids == index) & ~batch.padding]
    return found


def train_and_export(rank, num_ranks, port, path, out, layout):
    """Log-probs with and without the adapters, by sequence, of a model that made three updates and was exported."""
    optimizer = OptimizerConfig(lr=3e-2)
    trainer = trainer_config(num_ranks, **layout, lora=LORA, optimizer=optimizer)
    worker = TrainerWorker(
        trainer, Path(path), seed=1, rank=rank, world_size=num_ranks, master_addr="127.0.0.1", master_port=port,
        total_updates=3,
    )  # fmt: skip
    worker.trainer_tokens = trainer.max_tokens_per_rank
    worker.load_hf()
    for step in range(3):
        batches = packed_batches(step, worker.layout, trainer.max_tokens_per_rank)
        worker.runner.train_update(batches, token_cross_entropy, denominator=100.0, temperature=1.0)
    worker.export_hf(Path(out))
    adapted = logprobs(worker)
    with without_adapters(worker.chunks):
        base = logprobs(worker)
    worker.close()
    return adapted, base


@torch.no_grad()
def transformers_logprobs(model) -> dict[int, np.ndarray]:
    found = {}
    for number, segment in enumerate(sequences(STEP)[0]):
        tokens_T = torch.tensor(segment.tokens)
        logits_TV = model.eval()(tokens_T[None]).logits[0, :-1].float()
        found[number] = logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0].numpy()
    return found


def assert_equal_logprobs(by_rank, expected):
    ours = {number: values for part in by_rank for number, values in part.items()}
    assert ours.keys() == expected.keys()
    for number, values in expected.items():
        np.testing.assert_allclose(ours[number][: len(values)], values, atol=1e-5)


FAMILIES = ["qwen3_moe", "deepseek_v3"]
MORE_FAMILIES = ["qwen3", "glm4_moe", "moonlight", "qwen3_next_mixed", "qwen3_moe_mixed"]


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_FAMILIES)])
def test_peft_loads_the_exported_adapters_and_computes_what_the_trainer_does(tmp_path, name):
    path, out = small_model(name, tmp_path / "model"), tmp_path / "out"
    layout = {} if name == "qwen3" else {"expert": 2}
    parts = run_ranks(train_and_export, 2, str(path), str(out), layout)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert_equal_logprobs([base for _, base in parts], before := transformers_logprobs(base))
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert_equal_logprobs([adapted for adapted, _ in parts], after := transformers_logprobs(merged))
    assert max(abs(after[number] - before[number]).max() for number in after) > 0.05
    adapted = PeftModel.from_pretrained(base, out / "adapter")
    assert_equal_logprobs([adapted for adapted, _ in parts], transformers_logprobs(adapted))
