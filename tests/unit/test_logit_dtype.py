"""Logits of a bfloat16 model stay in bfloat16 until log-probs are computed, without a change of any bit."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slimrl.trainer import micro_batch_runner
from slimrl.trainer.micro_batch_runner import MicroBatchRunner, output_options
from slimrl.trainer.vocab_parallel import vocab_parallel_logprobs

TOKENS, VOCABULARY, WIDTH = 11, 37, 8


class Model(MegatronModule):
    """The last stage of a pipeline: one matrix."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        self.vp_stage, self.pg_collection = None, SimpleNamespace(pp=group)
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_1T: Tensor, *given: object, packed_seq_params: object) -> Tensor:
        return 20 * self.head(self.embed(tokens_1T))


class Wrapped(nn.Module):
    """Stands for Megatron's wrapper for data parallelism."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: object, **options: object) -> Tensor:
        return self.module(*given, **options)


def chunk_of(*, bf16: bool) -> Wrapped:
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, bf16=bf16)
    model = Model(config)
    return Wrapped(Float16Module(config, model) if bf16 else model)


def run(monkeypatch: pytest.MonkeyPatch, chunk: Wrapped, **options: bool) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """Log-probs, entropy, the gradient of the last matrix, and the dtype of the logits."""
    runner = object.__new__(MicroBatchRunner)
    runner.chunks, runner.output_options = [chunk], options
    runner.layout, runner.vocab_size, runner.chunk_tokens = SimpleNamespace(tensor=1), VOCABULARY - 2, 4
    runner.done, runner.total, runner.on_progress = 0, 1, lambda done, total: None
    dtypes: list[torch.dtype] = []
    runner.routing_replay, runner.mtp, runner.output_layer = None, None, None
    runner.router_stats = SimpleNamespace(observe=lambda padding_T: torch.enable_grad())

    def noted(logits_TV: Tensor, *given: Tensor, **how: object) -> tuple[Tensor, Tensor]:
        dtypes.append(logits_TV.dtype)
        return vocab_parallel_logprobs(logits_TV, *given, **how)

    monkeypatch.setattr(micro_batch_runner, "vocab_parallel_logprobs", noted)
    tokens_T = torch.arange(TOKENS) * 3 % (VOCABULARY - 2)
    batch = SimpleNamespace(
        tokens_T=tokens_T,
        position_ids_T=tokens_T,
        padding_T=None,
        packed_seq_params=None,
        targets_T=tokens_T.roll(1),
        mtp=None,
    )
    output, finish = runner._forward(0.7, lambda *values: values, iter([batch]), chunk)
    logprobs_T, entropy_T, _ = finish(output)
    (logprobs_T.sum() - 0.1 * entropy_T.sum()).backward()
    (head,) = [parameter for name, parameter in chunk.named_parameters() if "head" in name]
    return logprobs_T.detach(), entropy_T.detach(), head.grad, dtypes[0]


def test_a_bfloat16_model_s_logits_stay_so_and_log_probs_are_the_same(monkeypatch: pytest.MonkeyPatch):
    whole = run(monkeypatch, chunk_of(bf16=True), fp32_output=True)
    kept = run(monkeypatch, chunk := chunk_of(bf16=True), **output_options(chunk))
    assert (whole[3], kept[3]) == (torch.float32, torch.bfloat16)
    assert kept[0].dtype == kept[1].dtype == torch.float32
    for expected, value in zip(whole[:3], kept[:3], strict=True):
        assert torch.equal(expected, value)
    assert kept[2].abs().max() > 0


def test_a_float32_model_is_called_as_before(monkeypatch: pytest.MonkeyPatch):
    chunk = chunk_of(bf16=False)
    assert output_options(chunk) == {}
    assert run(monkeypatch, chunk, **output_options(chunk))[3] == torch.float32
