"""The absolute scale of an update: the real trainer, one rank in this process, against transformers and torch's AdamW.

Layouts, resumed runs and other ranks are compared with one rank elsewhere; here one rank is compared with the formulas.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slimrl.config.schema import AlgorithmConfig, OptimizerConfig, Precision, TrainerConfig
from slimrl.data.packing import MicroBatch, PackedSequence, pack
from slimrl.rollout.ports import free_port
from slimrl.trainer.objectives import gspo_objective, sft_objective
from slimrl.trainer.worker import TrainerWorker

VOCAB, LENGTHS = 37, (21, 9, 14)
CLIP_LOW, CLIP_HIGH = 0.05, 0.1
"""At a temperature of 0.7 no ratio is clipped, at 1.3 one of the three is."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random Qwen3-MoE whose norms are not 1."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
            norm_topk_prob=True, initializer_range=0.1, max_position_embeddings=64, dtype="float32",
        )
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture
def start_trainer(checkpoint):
    """Makes the one rank of a trainer of the checkpoint, in place of the one before."""
    workers = []

    def start(**optimizer) -> TrainerWorker:
        close_all()
        settings = OptimizerConfig(**optimizer)
        trainer = TrainerConfig(max_tokens_per_rank=64, precision=Precision.fp32, optimizer=settings)
        address = {"master_addr": "127.0.0.1", "master_port": free_port()}
        worker = TrainerWorker(trainer, checkpoint, seed=1, rank=0, world_size=1, total_updates=8, **address)
        workers.append(worker)
        worker.load_hf()
        return worker

    def close_all() -> None:
        while workers:
            workers.pop().close()

    yield start
    close_all()


def reference(checkpoint: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )


def sequences() -> list[PackedSequence]:
    rng = np.random.default_rng(5)
    return [
        PackedSequence(
            tokens=rng.integers(0, VOCAB, length),
            loss_mask=rng.random(length) < 0.6,
            rollout_logprobs=rng.normal(-3.7, 0.2, length).astype(np.float32),
            trajectory=index,
        )
        for index, length in enumerate(LENGTHS)
    ]


ADVANTAGES = np.array([1.5, -0.5, 0.75], np.float32)


def micro_batches(budget_tokens: int) -> list[MicroBatch]:
    """One of all sequences, or one for each; old log-probs are the rollout's."""
    (batches,) = pack(sequences(), ADVANTAGES, budget_tokens=budget_tokens, alignment=1, data_parallel=1)
    for batch in batches:
        batch.old_logprobs = batch.rollout_logprobs
    return batches


def logprobs_of(model: Qwen3MoeForCausalLM, sequence: PackedSequence, temperature: float) -> torch.Tensor:
    """Of the tokens to learn from."""
    tokens_T = torch.from_numpy(sequence.tokens)
    logprobs_TV = (model(tokens_T[None, :-1]).logits[0] / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, tokens_T[1:, None])[:, 0][torch.from_numpy(sequence.loss_mask[1:])]


def sft_loss(model: Qwen3MoeForCausalLM, temperature: float) -> torch.Tensor:
    return -sum(logprobs_of(model, sequence, temperature).sum() for sequence in sequences())


def gspo_loss(model: Qwen3MoeForCausalLM, temperature: float) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for sequence, advantage in zip(sequences(), ADVANTAGES.tolist(), strict=True):
        old = torch.from_numpy(sequence.rollout_logprobs[1:][sequence.loss_mask[1:]])
        ratio = (logprobs_of(model, sequence, temperature) - old).mean().exp()
        total -= torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    return total


def gradient_norm(model: Qwen3MoeForCausalLM) -> float:
    return torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt().item()


LOSSES = {
    "gspo": (gspo_objective(AlgorithmConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)), gspo_loss),
    "sft": (sft_objective(), sft_loss),
}


def test_the_gradient_is_that_of_the_summed_loss_over_the_denominator(checkpoint, start_trainer):
    """At a learning rate of 0, so that every update starts from the same weights."""
    worker = start_trainer(lr=0.0)
    for name, (objective, loss_of) in LOSSES.items():
        for denominator, temperature, budget_tokens in ((3.0, 0.7, 64), (3.0, 0.7, 20), (29.0, 1.3, 64)):
            model = reference(checkpoint)
            loss = loss_of(model, temperature)
            (loss / denominator).backward()
            result = worker.train_update(
                micro_batches(budget_tokens), objective, denominator=denominator, temperature=temperature
            )
            case = f"{name} {denominator} {temperature} {budget_tokens}"
            assert result.sums["loss"] == pytest.approx(loss.item(), rel=1e-5), case
            assert result.grad_norm == pytest.approx(gradient_norm(model), rel=1e-5), case


def test_updates_are_those_of_adamw_on_gradients_cut_to_the_clipping_norm(checkpoint, start_trainer, tmp_path):
    """An epsilon of the order of the clipped gradients keeps Adam from hiding their scale."""
    worker = start_trainer(lr=0.01, warmup_steps=4, clip_grad=0.25, beta1=0.8, beta2=0.95, eps=3e-3, weight_decay=0.1)
    model = reference(checkpoint)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=3e-3)
    objective, loss_of = LOSSES["sft"]
    for update in (1, 2, 3):
        optimizer.zero_grad()
        loss = loss_of(model, 0.7)
        (loss / 29).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25).item()
        assert norm > 0.5
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * update / 4
        optimizer.step()
        result = worker.train_update(micro_batches(64), objective, denominator=29.0, temperature=0.7)
        assert (result.lr, result.grad_norm) == pytest.approx((0.01 * update / 4, norm), rel=1e-5)
    model.float().save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    actual = dict(worker.weight_source().tensors())
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=5e-7, err_msg=name)


def test_a_resumed_run_follows_its_own_learning_rate_from_where_it_was(start_trainer, tmp_path):
    def update(worker: TrainerWorker) -> float:
        return worker.train_update(micro_batches(64), LOSSES["sft"][0], denominator=29.0, temperature=0.7).lr

    first = start_trainer(lr=0.01, min_lr=0.001, warmup_steps=4)
    assert update(first) == pytest.approx(0.01 / 4)
    first.save_checkpoint(tmp_path / "checkpoint")
    resumed = start_trainer(lr=0.03, min_lr=0.003, warmup_steps=4)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert update(resumed) == pytest.approx(0.03 * 2 / 4)
