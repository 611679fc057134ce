"""SmolLM2-135M-Instruct, a pretrained model of 30 layers with 3 heads of keys and values, against transformers."""

import asyncio
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_probes import KEY
from fleet import Fleet
from ranks import run_ranks
from real_model import real_model
from safetensors.torch import load_file
from trainer_cases import token_cross_entropy, trainer_config
from transformers import AutoModelForCausalLM, AutoTokenizer
from weight_cases import packed_logits

from slimrl.config.model_rules import model_violations
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import LoraConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.data.engine import GenerateRequest
from slimrl.data.packing import pack
from slimrl.data.trajectory import Segment
from slimrl.engines.client import SglangEngine
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TEXTS = [
    "The capital of France is Paris, and 17 + 25 = 42.",
    "def add(a, b):\n    return a + b\n",
    "Größe, naïve, 漢字, emoji 🙂 and   several  spaces  12",
    "One more sentence, which is longer than the others so that the lengths differ enough to matter: 1, 2, 3, 4, 5.",
]


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    return real_model(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def model(fetched) -> Path:
    return fetched[0]


def token_sequences(model: Path) -> list[list[int]]:
    """Conversations in the model's own template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    turns = [[{"role": "user", "content": "Repeat."}, {"role": "assistant", "content": text}] for text in TEXTS]
    return [tokenizer.apply_chat_template(messages, return_dict=False) for messages in turns]


def reference_logits(model: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """float32 [T, V] of each sequence."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        return [reference(torch.tensor([tokens])).logits[0] for tokens in sequences]


def reference_logprobs(model: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    """float64 [T - 1] of each sequence: each token's but the first."""
    return [
        logits_TV[:-1].double().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        for tokens, logits_TV in zip(sequences, reference_logits(model, sequences), strict=True)
    ]


def test_the_converted_weights_are_those_that_transformers_reads_from_the_file_bit_for_bit(fetched):
    model, file = fetched
    if file is None:
        pytest.skip("the GGUF file from which the folder was made is not there")
    expected = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).state_dict()
    found = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


def test_texts_come_back_from_the_tokenizer_and_digits_stand_alone(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize("a  2048") == ["a", "ĠĠ", "2", "0", "4", "8"]


def test_the_template_has_a_system_prompt_and_turns_that_end_with_the_end_of_text_of_the_model(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert read_hf_config(model)["eos_token_id"] == tokenizer.eos_token_id


def test_the_layouts_that_split_its_heads_are_refused_with_the_reason(model):
    recipe = Recipe(
        trainer=TrainerConfig(num_ranks=2, parallel=ParallelConfig(tensor=2)),
        rollout=RolloutConfig(engine_tp=2, max_trajectory_tokens=64),
    )
    found = list(model_violations(recipe, read_hf_config(model), "train"))
    assert ("trainer.parallel.tensor", "2 does not divide the model's 9 attention heads.") in [
        (key, text.split(" Use")[0]) for key, text in found
    ]
    said = [text for key, text in found if key == "trainer.parallel.tensor"]
    assert any("3 key-value heads, which the trainer does not split" in text for text in said)
    assert any("2 does not divide the model's 9 attention heads" in text for key, text in found if "engine_tp" in key)


def packed_difference(model: Path, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """(difference, transformers' logits), both float32 [T, V]."""
    sequences = token_sequences(model)
    bounds = [0, *np.cumsum([len(tokens) for tokens in sequences]).tolist()]
    tokens_T = torch.tensor([token for tokens in sequences for token in tokens])
    ((logits_TV,),) = run_ranks(packed_logits, 1, [model], tokens_T, bounds, precision, timeout_s=200)
    expected_TV = torch.cat(reference_logits(model, sequences))
    assert [len(tokens) for tokens in sequences] == [b - a for a, b in pairwise(bounds)]
    return torch.from_numpy(logits_TV) - expected_TV, expected_TV


def test_megatron_gives_the_logits_of_transformers_over_all_layers(model):
    difference, expected_TV = packed_difference(model, Precision.fp32)
    assert difference.abs().max() < 1e-4 * expected_TV.abs().max()


@pytest.mark.full
def test_megatron_in_bfloat16_gives_the_same_up_to_rounding(model):
    difference, expected_TV = packed_difference(model, Precision.bf16)
    # Of a model with another bit per value it would be half as much, of another model about 1.4.
    assert difference.square().mean().sqrt() < 0.05 * expected_TV.square().mean().sqrt()


def make_worker(rank: int, num_ranks: int, port: int, path: str, **settings) -> TrainerWorker:
    worker = TrainerWorker(
        trainer_config(num_ranks, max_tokens_per_rank=256, **settings), Path(path), seed=1, rank=rank,
        world_size=num_ranks, meeting=f"tcp://127.0.0.1:{port}", total_updates=4,
    )  # fmt: skip
    worker.load_hf()
    return worker


def micro_batches(worker: TrainerWorker, sequences: list[list[int]]):
    segments = [[Segment.not_sampled(tokens, [True] * len(tokens))] for tokens in sequences]
    layout = worker.layout
    return pack(
        segments,
        np.zeros(len(segments), np.float32),
        budget_tokens=256,
        alignment=layout.alignment,
        data_parallel=layout.data,
        micro_batch_multiple=layout.micro_batch_multiple,
    )[layout.data_rank]


def logprobs_by_sequence(worker: TrainerWorker, batches) -> dict[int, np.ndarray]:
    outputs = worker.runner.compute_logprobs(batches, 1.0)
    return {
        int(trajectory): output.logprobs[(batch.trajectory_ids == index) & ~batch.padding]
        for batch, output in zip(batches, outputs or [], strict=outputs is not None)
        for index, trajectory in enumerate(batch.trajectories)
    }


def read_and_export(rank, num_ranks, port, path, sequences, settings, out):
    """Log-probs by sequence, after the weights were written to `out`."""
    worker = make_worker(rank, num_ranks, port, path, **settings)
    worker.export_hf(Path(out))
    result = logprobs_by_sequence(worker, micro_batches(worker, sequences))
    destroy_parallel()
    return result


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"pipeline": 2}, {"context": 2}], ids=["pp2", "cp2"])
def test_two_ranks_give_the_logprobs_of_transformers_and_export_the_weights_bit_for_bit(model, tmp_path, settings):
    sequences = token_sequences(model)
    parts = run_ranks(read_and_export, 2, str(model), sequences, settings, str(tmp_path / "out"), timeout_s=250)
    found = dict(pair for part in parts for pair in part.items())
    for index, expected_T in enumerate(reference_logprobs(model, sequences)):
        np.testing.assert_allclose(found[index], expected_T, atol=2e-4)
    before, after = ({k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
                     for path in (model, tmp_path / "out"))  # fmt: skip
    assert before.keys() == after.keys()
    assert not [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]


def train_adapters(rank, num_ranks, port, path, sequences):
    """Log-probs before the first update, the loss of each update, and names of frozen weights that changed."""
    worker = make_worker(
        rank, num_ranks, port, path, lora=LoraConfig(rank=8, alpha=16.0), optimizer=OptimizerConfig(lr=1e-3)
    )
    batches = micro_batches(worker, sequences)
    frozen = [(name, value) for name, value in worker.chunks[0].named_parameters() if not value.requires_grad]
    before = {name: value.detach().clone() for name, value in frozen}
    at_start = logprobs_by_sequence(worker, batches)
    tokens = sum(len(tokens) - 1 for tokens in sequences)
    losses = [
        worker.runner.train_update(batches, token_cross_entropy, denominator=tokens, temperature=1.0).sums["loss"]
        for _ in range(4)
    ]
    changed = [name for name, value in frozen if not torch.equal(value, before[name])]
    destroy_parallel()
    return at_start, losses, len(frozen), changed


@pytest.mark.full
def test_new_adapters_change_nothing_and_then_learn(model):
    sequences = token_sequences(model)
    ((at_start, losses, num_frozen, changed),) = run_ranks(train_adapters, 1, str(model), sequences, timeout_s=250)
    expected = reference_logprobs(model, sequences)
    for index, expected_T in enumerate(expected):
        np.testing.assert_allclose(at_start[index], expected_T, atol=2e-4)
    # Embedding and last norm, and two norms and four matrices of each layer.
    assert num_frozen == 2 + 30 * 6
    assert changed == []
    tokens = sum(len(tokens) - 1 for tokens in sequences)
    assert losses[0] / tokens == pytest.approx(-np.concatenate(expected).mean(), rel=1e-4)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.full
def test_an_engine_samples_with_the_logprobs_of_transformers(model, tmp_path):
    rollout = RolloutConfig(num_engines=1, max_trajectory_tokens=256, startup_timeout_s=200)
    prompts = token_sequences(model)

    async def answers(url: str):
        vocab = read_hf_config(model)["vocab_size"]
        engine = SglangEngine(url, key=KEY, vocab_size=vocab)
        ask = partial(
            GenerateRequest, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=12, stop_token_ids=(), timeout_s=100
        )
        try:
            return await asyncio.gather(
                *(engine.generate(ask(session_id=f"s{i}", input_ids=p, seed=i)) for i, p in enumerate(prompts))
            )
        finally:
            await engine.aclose()

    with Fleet(rollout, model, tmp_path, precision=Precision.fp32) as fleet:
        results = asyncio.run(answers(fleet.url))
    whole = [prompt + list(result.tokens) for prompt, result in zip(prompts, results, strict=True)]
    for prompt, result, expected_T in zip(prompts, results, reference_logprobs(model, whole), strict=True):
        np.testing.assert_allclose(result.logprobs, expected_T[len(prompt) - 1 :], atol=2e-4)
