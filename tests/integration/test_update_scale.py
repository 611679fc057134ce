"""The absolute scale of an update: the real trainer, one rank in this process, against transformers and torch's AdamW.

Layouts, resumed runs and other ranks are compared with one rank elsewhere; here one rank is compared with the formulas.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from groups import take_apart
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from slimrl.algorithms.objective import loss_function
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.config.schema.algorithm import AlgorithmConfig
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, TrainerConfig
from slimrl.data.packing import MicroBatch, pack
from slimrl.data.training import MemoryPart
from slimrl.data.trajectory import Segment
from slimrl.engines.servers.ports import free_port
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

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

    def start(megatron: dict | None = None, precision: Precision = Precision.fp32, **optimizer) -> TrainerWorker:
        close_all()
        settings = OptimizerConfig(**optimizer)
        trainer = TrainerConfig(
            max_tokens_per_rank=64, precision=precision, optimizer=settings, megatron=megatron or {}
        )
        address = {"meeting": f"tcp://127.0.0.1:{free_port()}"}
        worker = TrainerWorker(trainer, checkpoint, seed=1, rank=0, world_size=1, total_updates=8, **address)
        workers.append(worker)
        worker.load_hf()
        return worker

    def close_all() -> None:
        while workers:
            worker = workers.pop()
            worker.close()
            take_apart(worker.chunks)

    yield start
    close_all()


def reference(checkpoint: Path) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(
        checkpoint, attn_implementation="eager", experts_implementation="eager", dtype=torch.float64
    )


def sequences() -> list[Segment]:
    rng = np.random.default_rng(5)
    return [
        replace(
            Segment.not_sampled(rng.integers(0, VOCAB, length), rng.random(length) < 0.6),
            rollout_logprobs=rng.normal(-3.7, 0.2, length).astype(np.float32),
        )
        for length in LENGTHS
    ]


ADVANTAGES = np.array([1.5, -0.5, 0.75], np.float32)


def micro_batches(budget_tokens: int) -> list[MicroBatch]:
    """One of all sequences, or one for each; old log-probs are the rollout's."""
    segments = [[segment] for segment in sequences()]
    (batches,) = pack(segments, ADVANTAGES, budget_tokens=budget_tokens, alignment=1, data_parallel=1)
    for batch in batches:
        batch.added["old_logprobs"] = batch.rollout_logprobs
    return batches


def logprobs_of(model: Qwen3MoeForCausalLM, sequence: Segment, temperature: float) -> torch.Tensor:
    """Log-probs of the tokens to learn from."""
    tokens_T = torch.from_numpy(sequence.tokens).long()
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
    "gspo": (loss_function("policy", AlgorithmConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)), gspo_loss),
    "sft": (loss_function("sft", AlgorithmConfig()), sft_loss),
}


def test_the_gradient_is_that_of_the_summed_loss_over_the_denominator(checkpoint, start_trainer):
    """At a learning rate of 0, so that every update starts from the same weights."""
    worker = start_trainer(lr=0.0)
    for name, (objective, loss_of) in LOSSES.items():
        for denominator, temperature, budget_tokens in ((3.0, 0.7, 64), (3.0, 0.7, 20), (29.0, 1.3, 64)):
            model = reference(checkpoint)
            loss = loss_of(model, temperature)
            (loss / denominator).backward()
            result = worker.runner.train_update(
                micro_batches(budget_tokens), objective, denominator=denominator, temperature=temperature
            )
            case = f"{name} {denominator} {temperature} {budget_tokens}"
            assert result.sums["loss"] == pytest.approx(loss.item(), rel=1e-5), case
            assert result.grad_norm == pytest.approx(gradient_norm(model), rel=1e-5), case


@pytest.mark.parametrize("name", ["gspo", "ppo"])
def test_trajectories_of_no_advantage_change_no_gradient_whether_they_are_passed_or_left_out(start_trainer, name):
    """Over the same denominator, at a learning rate of 0; two of them, beside those that have one."""
    worker, found = start_trainer(lr=0.0), []
    objective = loss_function("policy", AlgorithmConfig(loss=name, clip_low=CLIP_LOW, clip_high=CLIP_HIGH))
    for copies in (0, 2):
        segments = [[segment] for segment in [*sequences(), *sequences()[:copies]]]
        advantages = np.append(ADVANTAGES, np.zeros(copies, np.float32))
        (batches,) = pack(segments, advantages, budget_tokens=20, alignment=1, data_parallel=1)
        for batch in batches:
            batch.added["old_logprobs"] = batch.rollout_logprobs
        found.append(worker.runner.train_update(batches, objective, denominator=5.0, temperature=0.7))
    left_out, passed = found
    assert passed.num_tokens > left_out.num_tokens
    assert passed.grad_norm == pytest.approx(left_out.grad_norm, rel=1e-5)
    assert passed.sums["loss"] == pytest.approx(left_out.sums["loss"], rel=1e-5)


@pytest.mark.parametrize("clip_grad", [0.25, 0.0])
def test_updates_are_those_of_adamw_on_gradients_cut_to_the_clipping_norm(
    checkpoint, start_trainer, tmp_path, clip_grad
):
    """An epsilon of the order of the clipped gradients keeps Adam from hiding their scale. A norm of 0 cuts nothing."""
    betas = {"beta1": 0.8, "beta2": 0.95}
    worker = start_trainer(lr=0.01, warmup_updates=4, clip_grad=clip_grad, eps=3e-3, weight_decay=0.1, **betas)
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad or math.inf).item()
        assert norm > 0.5
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * update / 4
        optimizer.step()
        result = worker.runner.train_update(micro_batches(64), objective, denominator=29.0, temperature=0.7)
        assert (result.lr, result.grad_norm) == pytest.approx((0.01 * update / 4, norm), rel=1e-5)
    model.float().save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    actual = dict(worker.weight_source().tensors())
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=5e-7, err_msg=name)


def test_a_resumed_run_follows_its_own_learning_rate_from_where_it_was(start_trainer, tmp_path):
    def update(worker: TrainerWorker) -> float:
        return worker.runner.train_update(micro_batches(64), LOSSES["sft"][0], denominator=29.0, temperature=0.7).lr

    first = start_trainer(lr=0.01, min_lr=0.001, warmup_updates=4)
    assert update(first) == pytest.approx(0.01 / 4)
    first.save_checkpoint(tmp_path / "checkpoint")
    resumed = start_trainer(lr=0.03, min_lr=0.003, warmup_updates=4)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert update(resumed) == pytest.approx(0.03 * 2 / 4)


def weights_of(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.weight_source().tensors()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def update(worker: TrainerWorker, objective=LOSSES["sft"][0], batches=None):
    return worker.runner.train_update(batches or micro_batches(64), objective, denominator=29.0, temperature=0.7)


def test_log_probs_entropies_and_experts_are_those_of_transformers(checkpoint, start_trainer):
    """Also behind an update with dropout, which a pass without gradient leaves out."""
    worker, model = start_trainer(lr=0.0, megatron={"hidden_dropout": 0.5}), reference(checkpoint)
    for budget_tokens, routing in ((64, True), (20, True), (20, False)):
        update(worker)
        batches = micro_batches(budget_tokens)
        outputs = worker.runner.compute_logprobs(batches, 0.7, routing=routing)
        assert len(outputs) == len(batches)
        for batch, output in zip(batches, outputs, strict=True):
            for place, trajectory in enumerate(batch.trajectories):
                here = (batch.trajectory_ids == place) & ~batch.padding
                tokens_T = torch.from_numpy(sequences()[trajectory].tokens)
                with torch.no_grad():
                    found = model(tokens_T[None, :-1], output_router_logits=True)
                log_p_TV = (found.logits[0] / 0.7).log_softmax(-1)
                expected_T = log_p_TV.gather(1, tokens_T[1:, None])[:, 0]
                counts_T = batch.mask[here]
                entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
                np.testing.assert_allclose(output.logprobs[here], np.where(counts_T, expected_T, 0), atol=1e-5)
                np.testing.assert_allclose(output.entropy[here], np.where(counts_T, entropy_T, 0), atol=1e-5)
                if not routing:
                    assert output.routed_experts is output.routing_margin is None
                    continue
                for layer, logits_TE in enumerate(found.router_logits):
                    best = logits_TE.double().sort(-1, descending=True)
                    chosen = np.sort(output.routed_experts[here, layer], axis=-1)
                    # Transformers gives the router's probabilities or its logits; either has the same order.
                    assert (chosen == best.indices[:, :2].sort(-1).values.numpy()).all()
                    logits = best.values if (best.values < 0).any() else best.values.log()
                    np.testing.assert_allclose(
                        output.routing_margin[here, layer], logits[:, 1] - logits[:, 2], atol=1e-4
                    )


def test_dropout_is_on_in_updates_alone(start_trainer):
    losses = [update(start_trainer(lr=0.0, megatron={"hidden_dropout": rate})).sums["loss"] for rate in (0.0, 0.0, 0.5)]
    assert losses[0] == losses[1]
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)


def test_an_update_whose_gradient_is_no_number_changes_nothing(start_trainer):
    worker = start_trainer(lr=0.01, warmup_updates=4)
    before = weights_of(worker)

    def broken(factor):
        def objective(logprobs_T, entropy_T, batch):
            sums = LOSSES["sft"][0](logprobs_T, entropy_T, batch)
            return replace(sums, loss=sums.loss * factor)

        return objective

    for factor in (math.nan, math.inf):
        result = update(worker, broken(factor))
        assert result.skipped
        assert not math.isfinite(result.grad_norm)
        assert same(weights_of(worker), before)
    # Neither moments nor the schedule have moved.
    result = update(worker)
    assert (result.skipped, result.lr) == (False, pytest.approx(0.01 / 4))
    fresh = start_trainer(lr=0.01, warmup_updates=4)
    assert update(fresh).grad_norm == result.grad_norm
    assert not same(weights_of(fresh), before)


def test_an_update_counts_the_tokens_that_are_no_padding_and_reports_its_routers(start_trainer):
    result = update(start_trainer(lr=0.0))
    assert result.num_tokens == sum(LENGTHS) - len(LENGTHS)
    assert 1.0 <= result.expert_load_max_over_mean <= 4 / 2
    assert 0 < result.router_entropy <= math.log(4)
    figures = []
    for before in (False, True):
        worker = start_trainer(lr=0.0)
        if before:
            update(worker)
        one = update(worker, batches=micro_batches(20)[:1])
        figures.append((one.expert_load_max_over_mean, one.router_entropy))
    assert figures[1] == pytest.approx(figures[0], rel=1e-6)
    assert figures[0] != pytest.approx((result.expert_load_max_over_mean, result.router_entropy), rel=1e-3)
    empty = micro_batches(64)
    empty[0].padding[:] = True
    with pytest.raises(ValueError, match="the update batch has no tokens"):
        start_trainer(lr=0.0).runner.train_update(empty, LOSSES["sft"][0], denominator=1.0, temperature=1.0)


def test_progress_is_told_after_each_micro_batch(start_trainer):
    worker, told = start_trainer(lr=0.0), []
    worker.runner.on_progress = lambda *progress: told.append(progress)
    batches = micro_batches(20)
    worker.runner.compute_logprobs(batches, 1.0)
    assert len(batches) > 1
    assert told == [(done, len(batches)) for done in range(len(batches) + 1)]


def test_a_checkpoint_is_whole_names_its_files_and_gives_back_all_that_an_update_needs(
    checkpoint, start_trainer, tmp_path
):
    settings = {"lr": 0.01, "warmup_updates": 2}
    # Weight decay of the norms of queries and keys makes groups of parameters of its own.
    megatron = {"hidden_dropout": 0.3, "apply_wd_to_qk_layernorm": True, "decoupled_weight_decay": False}
    worker, folder = start_trainer(**settings, megatron=megatron), tmp_path / "saved"
    (tmp_path / ".saved.partial").mkdir()
    (tmp_path / ".saved.partial" / "left over").touch()
    update(worker)
    digests = worker.save_checkpoint(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert {name: digest.bytes for name, digest in digests.items()} == files
    assert list(digests) == sorted(digests)
    facts = json.loads((folder / "checkpoint.json").read_text())
    assert facts["architecture"]["num_layers"] == 2
    assert facts["layout"] == worker.layout.sizes()
    config = json.loads((folder / "hf" / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"]) == ("qwen3_moe", VOCAB)
    with pytest.raises(ValueError, match="exists already"):
        worker.save_checkpoint(folder)
    saved = weights_of(worker)
    # With dropout the next update takes the random-number states too.
    expected, after = update(worker), weights_of(worker)

    again = start_trainer(**settings, megatron=megatron)
    torch.rand(7)
    again.load_checkpoint(folder)
    assert same(weights_of(again), saved)
    found = update(again)
    assert (found.sums, found.grad_norm, found.lr) == (expected.sums, expected.grad_norm, expected.lr)
    assert same(weights_of(again), after)

    # The weights alone, for another run.
    other = start_trainer(**settings)
    other.load_megatron(folder)
    assert same(weights_of(other), saved)
    assert update(other).lr == pytest.approx(0.01 / 2)
    assert not same(weights_of(other), saved)
    # In bfloat16 an update starts from main weights, which have to be the loaded ones too.
    idle = start_trainer(**settings | {"lr": 0.0}, precision=Precision.bf16)
    before = weights_of(idle)
    idle.load_megatron(folder)
    rounded = weights_of(idle)
    assert not same(rounded, before)
    update(idle)
    assert same(weights_of(idle), rounded)

    facts["layout"]["tensor"] = 2
    (folder / "checkpoint.json").write_text(json.dumps(facts))
    elsewhere = start_trainer(**settings, megatron={"hidden_dropout": 0.3})
    elsewhere.load_checkpoint(folder)
    assert same(weights_of(elsewhere), saved)
    # From the seed of the run.
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))

    facts["architecture"]["num_layers"] = 3
    (folder / "checkpoint.json").write_text(json.dumps(facts))
    for load in (elsewhere.load_checkpoint, elsewhere.load_megatron):
        with pytest.raises(ValueError, match="num_layers is 3 there and 2 here"):
            load(folder)


def test_an_optimizer_that_made_no_update_can_be_saved_and_starts_as_a_new_one(start_trainer, tmp_path):
    worker = start_trainer(lr=0.01)
    worker.save_checkpoint(tmp_path / "saved")
    update(worker)
    expected = weights_of(worker)
    again = start_trainer(lr=0.01)
    again.load_checkpoint(tmp_path / "saved")
    update(again)
    assert same(weights_of(again), expected)


@pytest.mark.parametrize("precision", list(Precision))
def test_memory_that_is_given_away_comes_back_with_what_it_held(start_trainer, precision):
    kept = start_trainer(lr=0.01, precision=precision)
    expected = [update(kept).sums, update(kept).sums, weights_of(kept)]
    lent = start_trainer(lr=0.01, precision=precision)
    found = [update(lent).sums]
    weights = [parameter.untyped_storage() for chunk in lent.chunks for parameter in chunk.parameters()]
    of_weights = {storage._cdata for storage in weights}
    state = [tensor.untyped_storage() for tensor in lent.optimizer.tensors()]
    state = [storage for storage in state if storage._cdata not in of_weights]
    gradients = [
        buffer.grad_data.untyped_storage()
        for chunk in lent.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    assert all(storage.nbytes() for storage in (*weights, *state, *gradients))
    lent.offload.release([MemoryPart.gradients])
    assert not any(storage.nbytes() for storage in gradients)
    assert all(storage.nbytes() for storage in (*weights, *state))
    lent.offload.release([MemoryPart.optimizer])
    assert not any(storage.nbytes() for storage in state)
    assert all(storage.nbytes() for storage in weights)
    lent.offload.release([MemoryPart.weights])
    assert not any(storage.nbytes() for storage in weights)
    with pytest.raises(AssertionError, match="taken twice"):
        lent.offload.release([MemoryPart.weights])
    lent.offload.restore([MemoryPart.weights])
    assert all(storage.nbytes() for storage in weights)
    assert not any(storage.nbytes() for storage in (*state, *gradients))
    lent.offload.restore([MemoryPart.optimizer, MemoryPart.gradients])
    # A second time, into the same memory of the host.
    lent.offload.release(list(MemoryPart))
    assert not any(storage.nbytes() for storage in (*weights, *state, *gradients))
    lent.offload.restore(list(MemoryPart))
    found += [update(lent).sums, weights_of(lent)]
    assert found[:2] == expected[:2]
    assert same(found[2], expected[2])


def test_an_export_is_a_checkpoint_in_the_precision_that_the_model_had(checkpoint, start_trainer, tmp_path):
    worker = start_trainer(lr=0.01, precision=Precision.bf16)
    assert {tensor.dtype for tensor in weights_of(worker).values()} == {torch.bfloat16}
    update(worker)
    expected = weights_of(worker)
    worker.export_hf(tmp_path / "export")
    with pytest.raises(ValueError, match="exists; an export never overwrites"):
        worker.export_hf(tmp_path / "export")
    with open_hf_checkpoint(tmp_path / "export") as found, open_hf_checkpoint(checkpoint) as given:
        assert {spec.dtype for spec in found.specs.values()} == {"float32"}
        assert {name: spec.shape for name, spec in found.specs.items()} == {
            name: spec.shape for name, spec in given.specs.items()
        }
        for name, spec in found.specs.items():
            tensor = found.read(name, tuple(slice(0, size) for size in spec.shape))
            assert torch.equal(tensor, expected[name].float())
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["dtype"], config["hidden_size"]) == ("float32", 16)
