"""What a recipe turns on to balance experts: the auxiliary loss against its formula, the bias against the load."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from trainer_cases import LAYERS, Run, gspo, model_config, packed_batches, start, trainer_config

from slimrl.trainer.layout.parallel import destroy_parallel
from slimrl.trainer.routers import model_routers
from slimrl.trainer.routing_replay import RoutingReplay

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

EXPERTS, TOPK, COEFFICIENT, RATE = 8, 2, 0.01, 1e-3
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def one_run(rank, num_ranks, port, sizes, megatron) -> Run:
    trainer = trainer_config(megatron=megatron)
    run = Run(trainer, start(trainer, rank, num_ranks, port), None, model_config(**sizes))
    run.optimizer.megatron.step_with_ready_grads = lambda: True
    run.optimizer.clip_grad = 0.0
    return run


def auxiliary_gradient(rank, num_ranks, port):
    """The gradient of the last router under an objective that is divided by a huge number, and the formula's."""
    run = one_run(rank, num_ranks, port, {}, AUXILIARY)
    router = model_routers(run.chunks)[-1]
    inputs = []
    router.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().double()[:, 0]))
    batches = packed_batches(0, run.layout, run.trainer.max_tokens_per_rank)
    run.runner.train_update(batches, gspo, denominator=1e20, temperature=0.7)
    weight = router.weight.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for hidden_TH in inputs:
        logits_TE = hidden_TH @ weight.T
        load_E = torch.zeros_like(logits_TE).scatter(1, logits_TE.topk(TOPK).indices, 1.0).mean(0) / TOPK
        total = total + len(hidden_TH) * COEFFICIENT * EXPERTS * (load_E * logits_TE.softmax(1).mean(0)).sum()
    (total / sum(batch.num_tokens for batch in batches)).backward()
    found = router.weight.main_grad.clone().numpy()
    destroy_parallel()
    return len(inputs) == len(batches), found, weight.grad.numpy()


def test_the_auxiliary_loss_has_its_own_weight_whatever_the_objective_is_divided_by():
    once_each, found, expected = run_ranks(auxiliary_gradient, 1)[0]
    assert once_each
    assert np.abs(expected).max() > 1e-5
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def moved_biases(rank, num_ranks, port):
    """Each router's bias after an update in which every token has experts 2 and 5."""
    run = one_run(rank, num_ranks, port, BIASED, {"moe_router_bias_update_rate": RATE})
    run.runner.routing_replay = RoutingReplay(run.chunks, 1, 0)
    batches = packed_batches(0, run.layout, run.trainer.max_tokens_per_rank)
    for batch in batches:
        batch.replay_experts = np.broadcast_to(np.int16((2, 5)), (len(batch.tokens), LAYERS, TOPK))
    run.runner.train_update(batches, gspo, denominator=100.0, temperature=0.7)
    biases = [router.expert_bias.clone().numpy() for router in model_routers(run.chunks)]
    destroy_parallel()
    return biases


def test_the_bias_moves_against_the_load_of_the_replayed_experts():
    biases = run_ranks(moved_biases, 1)[0]
    assert len(biases) == LAYERS
    expected = np.full(EXPERTS, RATE, np.float32)
    expected[[2, 5]] = -RATE
    for bias in biases:
        np.testing.assert_allclose(bias, expected, rtol=1e-5)
