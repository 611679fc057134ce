"""Emulated FP8 training: which layers round, and under which layouts the numbers stay."""

import os

import numpy as np
import pytest
from groups import leave_groups
from ranks import run_ranks
from small_models import small_model
from trainer_cases import Run, model_config, packed_batches, trainer_config

from slimrl.config.env_vars import FP8_SCALES
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.models.family import family_of
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import build_model, unwrap
from slimrl.trainer.layout.parallel import destroy_parallel, init_model_parallel, init_parallel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SIZES = {
    "num_layers": 2, "hidden_size": 128, "kv_channels": 64, "moe_ffn_hidden_size": 256, "num_moe_experts": 4,
}  # fmt: skip
"""On two tensor-parallel ranks each shard still has whole tiles of 128."""
ALIGNMENT = 16
"""Tokens to which sequences are padded under every layout, so that tiles of tokens are the same."""
TP2 = {"tensor": 2, "sequence": True, "expert_tensor": 2}
SAME_BATCHES = [TP2, {"tensor": 2, "sequence": True, "expert": 2}, {"pipeline": 2}]
"""Layouts of two ranks that both see every micro-batch, so that weight gradients add over the same tiles of tokens."""
ONE_ROUNDING = 2e-4
"""Relative change of a gradient norm by a value between two FP8 numbers, which another order of additions, or another
processor, rounds the other way; 8e-5 was seen."""
OTHER_BATCHES = [{"expert": 2}, {"context": 2}]


def emulated(scaling: str, **layout):
    return {**layout, "fp8": Fp8Scaling(scaling), "fp8_emulation": scaling != "off"}


def model():
    return model_config(**SIZES)


def save_weights(rank, num_ranks, port, path):
    layout = start(trainer_config(), rank, num_ranks, port, first=True)
    Run(trainer_config(), layout, None, model()).save_weights(path)
    destroy_parallel()


def start(trainer, rank, num_ranks, port, *, first):
    parallel = trainer.parallel
    # Half of the chunks that context parallelism needs.
    tile = ALIGNMENT // (parallel.context * (parallel.tensor if parallel.sequence else 1))
    if not first:
        return init_model_parallel(parallel, timeout_s=60, seed=7, tile=tile)
    return init_parallel(
        parallel, rank=rank, world_size=num_ranks, meeting=f"tcp://127.0.0.1:{port}", timeout_s=60, seed=7,
        tile=tile,
    )  # fmt: skip


def update_and_logprobs(rank, num_ranks, port, weights, cases):
    """For each case the log-probs of an update's sequences by trajectory, then what the update reports."""
    os.environ[FP8_SCALES] = "1"
    results = []
    for number, settings in enumerate(cases):
        trainer = trainer_config(num_ranks, **settings)
        if number:
            leave_groups()
        layout = start(trainer, rank, num_ranks, port, first=number == 0)
        run = Run(trainer, layout, weights, model())
        batches = packed_batches(0, layout, trainer.max_tokens_per_rank)
        outputs = run.runner.compute_logprobs(batches, 1.0)
        logprobs = {
            int(trajectory): output.logprobs[(batch.trajectory_ids == index) & ~batch.padding]
            for batch, output in zip(batches, outputs or [], strict=outputs is not None)
            for index, trajectory in enumerate(batch.trajectories)
        }
        results.append((logprobs, run.update(0)))
    destroy_parallel()
    return results


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("weights") / "initial")
    run_ranks(save_weights, 1, path)
    return path


def of_one_rank(weights, *scalings):
    cases = [emulated(scaling) for scaling in scalings]
    return dict(zip(scalings, run_ranks(update_and_logprobs, 1, weights, cases)[0], strict=True))


def differences(weights, scaling, layouts, reference):
    """By layout: the largest difference of a log-prob, their mean, and the relative one of the gradient norm."""
    cases = [emulated(scaling, **layout) for layout in layouts]
    ranks = run_ranks(update_and_logprobs, 2, weights, cases, timeout_s=200)
    expected, update = reference
    found = []
    for results in zip(*ranks, strict=True):
        logprobs = {key: value for of_rank, _ in results for key, value in of_rank.items()}
        assert logprobs.keys() == expected.keys()
        distances = absolute_differences(logprobs, expected)
        found.append((distances.max(), distances.mean(), abs(results[0][1].grad_norm / update.grad_norm - 1)))
    return found


def absolute_differences(logprobs, others):
    return np.abs(np.concatenate([logprobs[key] - others[key] for key in others]))


@pytest.mark.full
def test_blockwise_on_two_ranks_rounds_as_on_one(weights):
    reference = of_one_rank(weights, "blockwise", "off")
    for largest, _, grad_norm in differences(weights, "blockwise", SAME_BATCHES[:1], reference["blockwise"]):
        assert largest < 1e-5
        assert grad_norm < ONE_ROUNDING
    plain, block = reference["off"][1], reference["blockwise"][1]
    assert 1e-4 < abs(block.grad_norm / plain.grad_norm - 1) < 0.1


@pytest.mark.full
@pytest.mark.parametrize("scaling", ["blockwise", "mxfp8", "tensorwise", "delayed"])
def test_layouts_round_alike_where_they_share_scales(weights, scaling):
    """Where shards have scales of their own, layouts are as far apart as two roundings of the same numbers."""
    references = of_one_rank(weights, scaling, "off")
    effect = absolute_differences(references[scaling][0], references["off"][0]).mean()
    layouts = SAME_BATCHES + OTHER_BATCHES
    found = differences(weights, scaling, layouts, references[scaling])
    for layout, (largest, mean, grad_norm) in zip(layouts, found, strict=True):
        of_tiles, whole = scaling in ("blockwise", "mxfp8"), layout == {"pipeline": 2}
        if of_tiles or whole:
            assert largest < 1e-5, layout
        else:
            assert mean < 1.5 * effect, layout
        alike = ONE_ROUNDING if of_tiles and layout in SAME_BATCHES else 0.2
        assert grad_norm < (1e-5 if whole else alike), layout


def rounded_layers(rank, num_ranks, port, paths):
    """For each model the names of the weights of layers that round."""
    trainer = trainer_config(**emulated("blockwise"))
    start(trainer, rank, num_ranks, port, first=True)
    found = []
    for path in paths:
        config = read_hf_config(path)
        (chunk,) = build_model(trainer, family_of(config).megatron_config(config))
        modules = unwrap(chunk).named_modules()
        found.append(
            {f"{name}.weight" for name, module in modules if {"forward", "_forward_impl"} & vars(module).keys()}
        )
    destroy_parallel()
    return found


def test_the_layers_that_round_are_those_that_a_checkpoint_in_block_fp8_holds_quantised(tmp_path):
    paths = [small_model(name, tmp_path / name) for name in ("qwen3_moe", "deepseek_v3")]
    for path, rounded in zip(paths, run_ranks(rounded_layers, 1, paths)[0], strict=True):
        config = read_hf_config(path)
        rules = [entry for entry in family_of(config).weight_map(config).entries if entry.rule.quantizable]
        wanted = [set(entry.megatron) & rounded for entry in rules if not entry.rule.mtp]
        assert {len(names) for names in wanted} == {1}
        assert set().union(*wanted) == rounded
