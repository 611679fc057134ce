"""The trainer's log-probs of a Hugging Face checkpoint are those of transformers (logits: test_model_families)."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from trainer_cases import trainer_config

from slimrl.data.packing import MicroBatch, pack
from slimrl.data.trajectory import Segment
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

VOCAB = 90
LENGTHS = (31, 5, 18, 24)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Qwen3-MoE on disk, with norms that are not 1, and its logits by sequence."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        initializer_range=0.1,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        attn_implementation="eager",
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.1 * torch.randn_like(parameter)
        path = tmp_path_factory.mktemp("model")
        model.save_pretrained(path)
        logits = [model(torch.from_numpy(tokens)[None, :-1]).logits[0] for tokens in token_sequences()]
    return path, logits


def token_sequences() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length) for length in LENGTHS]


def micro_batches(worker: TrainerWorker) -> list[MicroBatch]:
    segments = [[Segment.not_sampled(tokens, [True] * len(tokens))] for tokens in token_sequences()]
    parts = pack(
        segments,
        np.zeros(len(segments), np.float32),
        budget_tokens=64,
        alignment=worker.layout.alignment,
        data_parallel=worker.layout.data,
        micro_batch_multiple=worker.layout.micro_batch_multiple,
    )
    return parts[worker.layout.data_rank]


def make_worker(rank: int, num_ranks: int, port: int, path: str, **settings) -> TrainerWorker:
    worker = TrainerWorker(
        trainer_config(num_ranks, **settings),
        Path(path),
        seed=1,
        rank=rank,
        world_size=num_ranks,
        meeting=f"tcp://127.0.0.1:{port}",
        total_updates=1,
    )
    worker.load_hf()
    return worker


def logprobs(rank, num_ranks, port, path, settings):
    worker = make_worker(rank, num_ranks, port, path, **settings)
    batches = micro_batches(worker)
    outputs = worker.runner.compute_logprobs(batches, 0.8)
    destroy_parallel()
    return [
        (int(trajectory), output.logprobs[(batch.trajectory_ids == index) & ~batch.padding])
        for batch, output in zip(batches, outputs or [], strict=outputs is not None)
        for index, trajectory in enumerate(batch.trajectories)
    ]


@pytest.mark.parametrize("settings", [{"expert": 2}, {"tensor": 2, "sequence": True, "expert": 2}])
def test_logprobs_of_two_ranks_equal_the_log_softmax_of_transformers(checkpoint, settings):
    path, expected = checkpoint
    actual = dict(pair for rank in run_ranks(logprobs, 2, str(path), settings) for pair in rank)
    for index, (tokens, logits_TV) in enumerate(zip(token_sequences(), expected, strict=True)):
        log_p_TV = (logits_TV.double() / 0.8).log_softmax(-1)
        wanted_T = log_p_TV.gather(1, torch.from_numpy(tokens[1:, None])).squeeze(1)
        np.testing.assert_allclose(actual[index], wanted_T.numpy(), atol=2e-5)
