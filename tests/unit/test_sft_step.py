"""One step of supervised training with a trainer that only answers."""

from types import SimpleNamespace

import numpy as np
import pytest

from slimrl.config.schema import Recipe, WandbMode
from slimrl.data.packing import PackedSequence
from slimrl.data.prompts import Sampler
from slimrl.data.training import UpdateResult
from slimrl.observability.metrics import read_metrics
from slimrl.observability.run_folder import RunFolder
from slimrl.observability.trackers import Trackers
from slimrl.runtime.sft import sft_loop
from slimrl.runtime.state import RunState


class Trainers:
    """One rank; the loss of each token is 0.5, and tokens that are not learned from count in `num_tokens`."""

    layout = SimpleNamespace(alignment=4, data=1, micro_batch_multiple=1)

    def __init__(self) -> None:
        self.denominators: list[float] = []

    def train_update(self, parts, objective, *, denominator, temperature):
        assert (objective, temperature) == ("sft", 1.0)
        self.denominators.append(denominator)
        num_targets = sum(int(batch.mask.sum()) for part in parts for batch in part)
        return UpdateResult(
            sums={"loss": 0.5 * num_targets}, grad_norm=1.0, skipped=False, lr=0.1, num_tokens=100,
            expert_load_max_over_mean=float("nan"), router_entropy=float("nan"),
        )  # fmt: skip

    def save_checkpoint(self, directory):
        directory.mkdir()
        return {}

    def export_hf(self, directory):
        directory.mkdir(parents=True)


def conversation(length: int, learned: int) -> PackedSequence:
    return PackedSequence(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) >= length - learned,
        rollout_logprobs=np.zeros(length, np.float32),
        trajectory=0,
    )


def test_the_loss_of_a_step_is_the_mean_over_the_tokens_that_are_learned_from(tmp_path):
    recipe = Recipe(steps=1)
    recipe.sft.batch_conversations, recipe.trainer.max_tokens_per_rank = 2, 64
    recipe.tracking.wandb = WandbMode.disabled
    folder, trainers = RunFolder(tmp_path), Trainers()
    for path in (folder.logs, folder.checkpoints):
        path.mkdir()
    quiet = SimpleNamespace(say=lambda text: None, summary=lambda step, metrics: None)
    examples = Sampler([conversation(9, 3), conversation(14, 4)], seed=0, shuffle=False)
    with Trackers(folder, recipe.tracking, {}) as trackers:
        sft_loop(recipe, examples, trainers, folder, trackers, quiet, RunState(), SimpleNamespace(asked=False))
    (line,) = read_metrics(folder.metrics)
    assert trainers.denominators == [7]
    assert line["sft/loss"] == pytest.approx(0.5)
