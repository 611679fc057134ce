"""A checkpoint that two trainer ranks export after an update is one model in Megatron, transformers and SGLang."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from engine_probes import KEY
from megatron.core import parallel_state as mpu
from ranks import run_ranks
from slimrl_tools.toy.toy import ToySize, write_toy
from small_models import WITH_EXPERTS
from trainer_cases import token_cross_entropy, trainer_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimrl.agent.chat.chat_format import ChatFormat
from slimrl.agent.chat.template import ChatTemplate
from slimrl.agent.transcript import Transcript
from slimrl.algorithms.mismatch import mismatch_metrics
from slimrl.algorithms.replay_gap import replay_gap_metrics
from slimrl.algorithms.routing import compare_routing
from slimrl.config.schema.algorithm import RoutingReplay
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.schema.trainer import OptimizerConfig
from slimrl.data.engine import GenerateRequest
from slimrl.data.packing import MicroBatch, pack
from slimrl.data.trajectory import Segment, Status, Trajectory
from slimrl.engines.client import SglangEngine
from slimrl.engines.servers.server import EngineServer
from slimrl.runtime.cluster.rank_batches import RankBatches
from slimrl.trainer.build import unwrap
from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.local_batch import shard_context
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SIZE = ToySize(layers=3, hidden=64, head_dim=16, moe_intermediate=48)
NEW_TOKENS = 24


def conversations(path) -> list[list[int]]:
    """Tokens of tool-use conversations of different lengths, in the checkpoint's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    chat = ChatFormat(ChatTemplate(tokenizer), [tokenizer.eos_token_id])
    tokens = []
    for number in range(6):
        text = f"{number + 31}*{7 * number + 12}+{90 - number}"
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": text}}}
        messages = [
            {"role": "user", "content": f"What is {text}?" + " Be brief." * number},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1234"},
            {"role": "assistant", "content": "\\boxed{1234}"},
        ]
        tokens.append(chat.training_sequences(messages, [])[0][0])
    return tokens


def make_worker(rank: int, num_ranks: int, port: int, path: str, **options: Any) -> TrainerWorker:
    settings = trainer_config(num_ranks, expert=2, optimizer=OptimizerConfig(lr=1e-2), max_tokens_per_rank=256)
    worker = TrainerWorker(
        settings, path, seed=1, rank=rank, world_size=num_ranks, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=1, **options,
    )  # fmt: skip
    worker.load_hf()
    return worker


def packed(worker: TrainerWorker, segments: list[list[Segment]]) -> list[MicroBatch]:
    """This rank's micro-batches."""
    advantages = np.zeros(len(segments), np.float32)
    layout = worker.layout
    parts = pack(segments, advantages, budget_tokens=256, alignment=layout.alignment, data_parallel=layout.data)
    return parts[layout.data_rank]


def update_and_export(rank, num_ranks, port, path, out):
    """One update on the conversations, the export, and the logits of the model in memory by conversation."""
    worker = make_worker(rank, num_ranks, port, path)
    batches = packed(worker, [[Segment.not_sampled(tokens, [True] * len(tokens))] for tokens in conversations(path)])
    worker.runner.train_update(batches, token_cross_entropy, denominator=100.0, temperature=1.0)
    worker.export_hf(out)
    logits = {}
    model = unwrap(worker.chunks[0]).eval()
    for batch in batches:
        local = shard_context(batch, mpu.get_context_parallel_group())
        with torch.no_grad():
            logits_TV = model(
                local.tokens_T[None], local.position_ids_T[None], None, packed_seq_params=local.packed_seq_params
            )[0]
        for index, trajectory in enumerate(batch.trajectories):
            logits[int(trajectory)] = logits_TV[(batch.trajectory_ids == index) & ~batch.padding].numpy()
    destroy_parallel()
    return logits


MORE_FAMILIES = [pytest.param(name, marks=pytest.mark.full) for name in WITH_EXPERTS if name != "qwen3_moe"]


@pytest.fixture(scope="module", params=["qwen3_moe", *MORE_FAMILIES])
def exported(request, tmp_path_factory):
    """(folder of the export, Megatron's logits by conversation)"""
    folder = tmp_path_factory.mktemp("export")
    write_toy(request.param, folder / "toy", SIZE, seed=0)
    parts = run_ranks(update_and_export, 2, folder / "toy", folder / "hf")
    return folder / "hf", {index: logits for part in parts for index, logits in part.items()}


@pytest.fixture(scope="module")
def model(exported):
    return AutoModelForCausalLM.from_pretrained(exported[0], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(exported, tmp_path_factory):
    """What an engine that loaded the export makes of each conversation's beginning: by temperature, with its prompt."""
    path, _ = exported
    rollout = RolloutConfig(max_trajectory_tokens=256, max_concurrency_per_engine=16, routed_experts=True)
    server = EngineServer(
        0, rollout, path, tmp_path_factory.mktemp("logs") / "engine.log", precision=Precision.fp32, key=KEY
    )
    prompts = [tokens[:length] for tokens, length in zip(conversations(path), (20, 25, 30, 35, 40, 45), strict=True)]

    async def ask():
        client = SglangEngine(server.url, routed_experts_shape=(SIZE.layers, SIZE.experts_per_token), key=KEY)
        requests = [
            GenerateRequest(
                session_id=f"{temperature}/{index}", input_ids=prompt, temperature=temperature, top_p=1.0, top_k=-1,
                max_new_tokens=NEW_TOKENS, stop_token_ids=(), timeout_s=60,
            )
            for temperature in (0.0, 1.0)
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip
        try:
            results = await asyncio.gather(*map(client.generate, requests))
        finally:
            await client.aclose()
        pairs = [(request.input_ids, result) for request, result in zip(requests, results, strict=True)]
        return {0.0: pairs[: len(prompts)], 1.0: pairs[len(prompts) :]}

    try:
        server.wait_ready()
        return asyncio.run(ask())
    finally:
        server.stop()


def test_the_export_holds_the_updated_weights_whose_logits_are_megatrons(exported, model):
    path, logits = exported
    before = AutoModelForCausalLM.from_pretrained(path.parent / "toy", dtype=torch.float32).state_dict()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    for index, tokens in enumerate(conversations(path)):
        with torch.no_grad():
            expected_TV = model(torch.tensor([tokens[:-1]])).logits[0]
        np.testing.assert_allclose(logits[index], expected_TV.numpy(), atol=1e-4)


def test_greedy_answers_of_the_engine_are_those_of_transformers_but_at_near_ties(model, answers):
    for prompt, answer in answers[0.0]:
        assert len(answer.tokens) == NEW_TOKENS
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0, len(prompt) - 1 : -1]
        taken_T = logits_TV.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        torch.testing.assert_close(taken_T, logits_TV.max(dim=1).values, atol=1e-5, rtol=0)


def routing_of_trainer(rank, num_ranks, port, path, trajectories):
    """(comparison with the engine's routing, log-prob differences, margins where routed) of each micro-batch."""
    worker = make_worker(rank, num_ranks, port, path)
    batches = packed(worker, [trajectory.segments for trajectory in trajectories])
    outputs = worker.runner.compute_logprobs(batches, 1.0, routing=True)
    destroy_parallel()
    return [
        (
            compare_routing(
                batch.routed_experts, output.routed_experts, output.routing_margin, batch.cu_seqlens, batch.mask
            ),
            np.abs(output.logprobs - batch.rollout_logprobs)[batch.mask],
            (np.isfinite(output.routing_margin) == (output.routed_experts >= 0).any(-1)).all(),
        )
        for batch, output in zip(batches, outputs, strict=True)
    ]


def sampled_trajectories(answers) -> list[Trajectory]:
    trajectories = []
    for index, (prompt, answer) in enumerate(answers[1.0]):
        transcript = Transcript(prompt)
        transcript.add_turn(answer)
        trajectories.append(
            Trajectory(group_id="g", trajectory_id=str(index), segments=[transcript.segment()], status=Status.completed)
        )
    return trajectories


def test_engine_and_trainer_take_the_same_experts_but_at_near_ties(exported, answers):
    trajectories = sampled_trajectories(answers)
    parts = run_ranks(routing_of_trainer, 2, exported[0], trajectories)
    sampled = 0
    for comparison, difference, margins_where_routed in (result for part in parts for result in part):
        assert margins_where_routed
        assert (comparison.first_margins < 1e-4).all()
        unreached = difference[~comparison.reached_S]
        assert unreached.max() < 2e-5
        sampled += len(unreached)
    # Flips are rare: most of the tokens have been compared.
    assert sampled > 0.5 * len(trajectories) * NEW_TOKENS


def noisy_routers(rank, num_ranks, port, path, trajectories):
    """Reports with the engine's experts replayed and without, of a trainer that chooses experts by noisy scores."""
    worker = make_worker(rank, num_ranks, port, path, routing_replay=RoutingReplay.rollout)
    generator = torch.Generator().manual_seed(rank)
    for layer in worker.runner.routing_replay.layers:

        def noisy(scores, topk, num_groups=None, group_topk=None, choose=None, ask=layer.get_replay_topk):
            def choose_with_noise(scores, topk, **groups):
                noise = scores.std() * torch.randn(scores.shape, generator=generator)
                _, experts = choose(scores + noise, topk, **groups)
                return scores.gather(1, experts), experts

            return ask(scores, topk, num_groups, group_topk, choose_with_noise)

        layer.get_replay_topk = noisy
    batches = packed(worker, [trajectory.segments for trajectory in trajectories])
    held = RankBatches(worker.runner, RoutingReplay.rollout)
    held.put_batches([batches])
    reports = held.add_logprobs(0, "old", 1.0, True), held.report_own_routing(0, 1.0)
    destroy_parallel()
    return *reports, batches


def test_with_the_engines_experts_a_trainer_with_noisy_routers_computes_the_engines_logprobs(exported, answers):
    parts = run_ranks(noisy_routers, 2, exported[0], sampled_trajectories(answers))
    replayed, own, batches = ([one for part in parts for one in part[which]] for which in range(3))
    metrics, gap = mismatch_metrics(replayed, batches), replay_gap_metrics(own, batches)
    assert metrics["mismatch/routing_flips"] == metrics["routing/differs_fraction"] == 0
    assert metrics["mismatch/logprob_abs_max"] < 2e-5
    assert gap["routing/unreplayed_differs_fraction"] > 0.2
    assert gap["routing/unreplayed_logprob_abs_mean"] > 100 * metrics["mismatch/logprob_abs_mean"]
