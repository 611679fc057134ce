"""Losses and advantages against TRL's and verl's own functions, on random trajectories: `make test-peers`.

Both pad each trajectory to one length; here the same tokens lie in one packed micro-batch.
"""

from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from slimrl.algorithms.advantages import group_advantages
from slimrl.algorithms.kl import kl
from slimrl.algorithms.objective import denominator, policy_objective
from slimrl.algorithms.policy_tokens import LossBatch
from slimrl.algorithms.token_advantages import whitening_deviation
from slimrl.algorithms.values import estimate_advantages, value_objective
from slimrl.config.schema.algorithm import (
    Aggregation,
    AlgorithmConfig,
    CorrectionConfig,
    KlEstimator,
    LossName,
    OldPolicy,
)
from slimrl.data.trajectory import Trajectory

LENGTHS = (5, 9, 2, 17, 4, 12, 3, 8)
WIDTH = 20
"""Width of the peers' padded rows, and the length that `constant` divides by"""


class Rows:
    """[N, WIDTH] float64 arrays, of which a row's first tokens count, without a few that a tool wrote."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (len(LENGTHS), WIDTH)
        self.present = np.arange(WIDTH) < np.array(LENGTHS)[:, None]
        self.mask = self.present & (rng.random(shape) < 0.7)
        self.mask[:, 0] = True
        self.old = -rng.random(shape)
        self.new = self.old + 0.2 * rng.normal(size=shape)
        self.reference = self.old + 0.3 * rng.normal(size=shape)
        self.advantages = rng.normal(size=len(LENGTHS))

    def ours(self, settings: AlgorithmConfig) -> tuple[float, np.ndarray]:
        """Value and gradient [N, WIDTH] of the whole update."""
        new = torch.from_numpy(self.new).requires_grad_()
        added = {"old_logprobs": self.old}
        if settings.kl_coef:
            added["reference_logprobs"] = self.reference
        packed = self._packed(added)
        found = policy_objective(
            new[self.present], torch.zeros(sum(LENGTHS)), packed, settings=settings, entropy_coef=0.0
        )
        by = denominator(
            settings.aggregation, num_trajectories=len(LENGTHS), num_tokens=int(self.mask.sum()), length=WIDTH
        )
        (found.loss / by).backward()
        assert new.grad is not None
        return found.loss.item() / by, new.grad.numpy()

    def our_value_loss(self, value_clip: float) -> tuple[tuple[float, np.ndarray], float]:
        """Value and gradient by token, and the fraction that is clipped. `new` and `old` are values, and what they are
        trained toward is `reference`."""
        new, count = torch.from_numpy(self.new).requires_grad_(), int(self.mask.sum())
        packed = self._packed({"values": self.old, "returns": self.reference})
        found = value_objective(new[self.present], torch.zeros(sum(LENGTHS)), packed, value_clip=value_clip)
        return _with_gradient(found.loss / count, new), float(found.reported["clipped"]) / count

    def _packed(self, added: dict[str, np.ndarray]) -> LossBatch:
        """All tokens that are present, one row after the other."""
        return LossBatch(
            mask_T=torch.from_numpy(self.mask[self.present]),
            trajectory_ids_T=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
            rollout_logprobs_T=torch.from_numpy(self.old[self.present]),
            added_T={name: torch.from_numpy(values[self.present]) for name, values in added.items()},
            num_sampled_N=torch.from_numpy(self.mask.sum(1)),
            advantages_N=torch.from_numpy(self.advantages),
            remote_N={},
            sum_over_ranks=None,
        )

    def verl(self, name: str, mode: str, **settings: float) -> tuple[float, np.ndarray]:
        new = torch.from_numpy(self.new).requires_grad_()
        config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
        advantages = torch.from_numpy(self.advantages)[:, None].expand(-1, WIDTH)
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=torch.from_numpy(self.old),
            log_prob=new,
            advantages=advantages,
            response_mask=torch.from_numpy(self.mask).double(),
            loss_agg_mode=mode,
            config=config,
        )
        return _with_gradient(loss, new)

    def trl(self, **settings: object) -> tuple[float, np.ndarray]:
        """GRPOTrainer's loss in its evaluation mode, which accumulates nothing, for given log-probs."""
        new, mask = torch.from_numpy(self.new).requires_grad_(), torch.from_numpy(self.mask).double()
        options = {
            "loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.1, "epsilon_high": 0.2,
            "beta": 0.0, "off_policy_mask_threshold": None, "top_entropy_quantile": 1.0, "use_vllm": False,
            "aux_loss_enabled": False, "_entropy_bonus_enabled": False, "max_completion_length": WIDTH, **settings,
        }  # fmt: skip
        arguments = SimpleNamespace(
            delta=None, use_bias_correction_kl=options.pop("use_bias_correction_kl", False),
            sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        )  # fmt: skip
        accelerator = MagicMock(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
        trainer = MagicMock(**options, args=arguments, accelerator=accelerator)
        trainer.model.training = False
        trainer.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
        trainer._get_per_token_logps_and_entropies.return_value = new, torch.zeros_like(new), None
        inputs = {
            "prompt_ids": torch.zeros(len(LENGTHS), 1), "prompt_mask": torch.ones(len(LENGTHS), 1),
            "completion_ids": torch.zeros(len(LENGTHS), WIDTH), "completion_mask": mask,
            "advantages": torch.from_numpy(self.advantages), "old_per_token_logps": torch.from_numpy(self.old),
            "ref_per_token_logps": torch.from_numpy(self.reference), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        return _with_gradient(GRPOTrainer._compute_loss(trainer, None, inputs), new)


def _with_gradient(loss: Tensor, new: Tensor) -> tuple[float, np.ndarray]:
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad.numpy()


def config(loss: LossName, aggregation: Aggregation = Aggregation.trajectory, **settings) -> AlgorithmConfig:
    given = {"clip_low": 0.1, "clip_high": 0.2, "max_logprob_mismatch": 1.0, **settings}
    return AlgorithmConfig(loss=loss.value, aggregation=aggregation, **given)


BY_AGGREGATION = {
    Aggregation.trajectory: "seq-mean-token-mean",
    Aggregation.token: "token-mean",
    Aggregation.constant: "seq-mean-token-sum-norm",
}
CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}


def assert_same(ours: tuple[float, np.ndarray], theirs: tuple[float, np.ndarray]) -> None:
    """verl adds 1e-8 to counts, and TRL's temperatures are float32."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6, atol=1e-9)
    assert np.abs(theirs[1]).max() > 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", Aggregation)
@pytest.mark.parametrize(
    ("loss", "theirs"),
    [(LossName.ppo, "vanilla"), (LossName.gspo, "gspo"), (LossName.cispo, "cispo"), (LossName.gpg, "gpg")],
)
def test_losses_of_verl(loss, theirs, aggregation, seed):
    rows = Rows(seed)
    found = rows.verl(theirs, BY_AGGREGATION[aggregation], **CLIP, clip_ratio_c=1e9)
    assert_same(rows.ours(config(loss, aggregation)), found)


@pytest.mark.parametrize("seed", range(3))
def test_dual_clip_sapo_and_gmpo_of_verl(seed):
    rows = Rows(seed)
    dual = config(LossName.ppo, dual_clip=1.15)
    assert_same(rows.ours(dual), rows.verl("vanilla", "seq-mean-token-mean", **CLIP, clip_ratio_c=1.15))
    assert_same(rows.ours(config(LossName.sapo)), rows.verl("sapo", "", tau_pos=1.0, tau_neg=1.05))
    # verl's bounds are of the log-ratio.
    logs = {"clip_ratio_low": -float(np.log(0.9)), "clip_ratio_high": float(np.log(1.2))}
    assert_same(rows.ours(config(LossName.gmpo)), rows.verl("geo_mean", "", **logs))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "theirs"),
    {
        "grpo": (config(LossName.ppo), {}),
        "gspo": (config(LossName.gspo), {"importance_sampling_level": "sequence"}),
        "dapo": (config(LossName.ppo, Aggregation.token), {"loss_type": "dapo"}),
        "dr_grpo": (config(LossName.ppo, Aggregation.constant), {"loss_type": "dr_grpo"}),
        "sapo": (config(LossName.sapo), {"loss_type": "sapo"}),
        # TRL's bound is of the ratio itself, without a lower one.
        "cispo": (config(LossName.cispo, Aggregation.token, clip_low=1.0), {"loss_type": "cispo", "epsilon_high": 1.2}),
        "kl": (config(LossName.ppo, kl_coef=0.3, kl_estimator=KlEstimator.k3), {"beta": 0.3}),
        "kl without bias": (
            config(LossName.ppo, kl_coef=0.3, kl_estimator=KlEstimator.k3_weighted),
            {"beta": 0.3, "use_bias_correction_kl": True},
        ),
        "off-policy sequences": (
            config(LossName.ppo, old_policy=OldPolicy.trainer, correction=CorrectionConfig(max_gap=0.02)),
            {"off_policy_mask_threshold": 0.02},
        ),
    }.values(),
    ids=["grpo", "gspo", "dapo", "dr_grpo", "sapo", "cispo", "kl", "kl without bias", "off-policy sequences"],
)
def test_losses_of_trl(ours, theirs, seed):
    rows = Rows(seed)
    assert_same(rows.ours(ours), rows.trl(**theirs))


@pytest.mark.parametrize("estimator", [KlEstimator.k1, KlEstimator.k2, KlEstimator.k3])
def test_estimators_of_the_kl_of_verl(estimator):
    rng = np.random.default_rng(0)
    new, reference = torch.from_numpy(-rng.random(50)), torch.from_numpy(-rng.random(50))
    found = kl(new, reference, torch.zeros(50), estimator)
    np.testing.assert_allclose(found, core_algos.kl_penalty(new, reference, estimator.value), rtol=1e-9)


GROUPS = ["a", "b", "a", "a", "b", "c", "c", "b", "a"]


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        ("grpo", "grpo", {}),
        ("dr_grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "rloo", {}),
        ("opo", "opo", {}),
    ],
)
def test_advantages_of_verl(ours, theirs, options):
    rng = np.random.default_rng(1)
    rewards, lengths = rng.normal(size=len(GROUPS)), rng.integers(1, WIDTH, len(GROUPS))
    trajectories = [MagicMock(spec=Trajectory, num_sampled_tokens=int(length)) for length in lengths]
    found, _ = core_algos.get_adv_estimator_fn(theirs)(
        token_level_rewards=_at_the_end(rewards, lengths),
        response_mask=_mask(lengths),
        index=np.array(GROUPS),
        **options,
    )
    assert group_advantages(rewards, GROUPS, ours, trajectories=trajectories) == pytest.approx(
        found[:, 0].numpy(), rel=1e-5
    )


def test_whitening_of_verl():
    """verl whitens REINFORCE++ with a baseline by the unbiased deviation, slimrl by that of the tokens themselves."""
    rng = np.random.default_rng(2)
    rewards, lengths = rng.normal(size=len(GROUPS)), rng.integers(1, WIDTH, len(GROUPS))
    theirs, _ = core_algos.get_adv_estimator_fn("reinforce_plus_plus_baseline")(
        token_level_rewards=_at_the_end(rewards, lengths), response_mask=_mask(lengths), index=np.array(GROUPS)
    )
    values_S = np.repeat(group_advantages(rewards, GROUPS, "dr_grpo"), lengths).astype(np.float64)
    centred_S = values_S - values_S.mean()
    found_S = centred_S / whitening_deviation(len(values_S), float(np.square(centred_S).sum()))
    unbiased = np.sqrt((len(values_S) - 1) / len(values_S))
    np.testing.assert_allclose(found_S * unbiased, theirs[_mask(lengths).bool()], rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0)])
def test_generalised_advantages_of_verl_and_their_whitening(discount, gae_lambda, seed):
    """Rewards of each sampled token, `reference`, and values, `old`; both skip what the policy did not sample.

    verl returns whitened advantages, and returns from which the values can be taken away again.
    """
    rows = Rows(seed)
    whitened, returns = core_algos.compute_gae_advantage_return(
        token_level_rewards=torch.from_numpy(np.where(rows.mask, rows.reference, 0.0)),
        values=torch.from_numpy(rows.old),
        response_mask=torch.from_numpy(rows.mask).double(),
        gamma=discount,
        lam=gae_lambda,
    )
    found = [
        estimate_advantages(reward[sampled], old[sampled], discount=discount, gae_lambda=gae_lambda)
        for reward, old, sampled in zip(rows.reference, rows.old, rows.mask, strict=True)
    ]
    advantages_S, returns_S = (np.concatenate(part) for part in zip(*found, strict=True))
    np.testing.assert_allclose(returns_S, returns[rows.mask], rtol=1e-9)
    np.testing.assert_allclose(advantages_S, (returns.numpy() - rows.old)[rows.mask], rtol=1e-9, atol=1e-12)
    centred_S = advantages_S - advantages_S.mean()
    count = len(centred_S)
    found_S = centred_S / whitening_deviation(count, float(np.square(centred_S).sum()))
    # verl's deviation is the unbiased one.
    np.testing.assert_allclose(found_S * np.sqrt((count - 1) / count), whitened[rows.mask], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("value_clip", [0.1, 0.0])
def test_the_value_loss_of_verl(value_clip, seed):
    rows = Rows(seed)
    new = torch.from_numpy(rows.new).requires_grad_()
    loss, clip_fraction = core_algos.compute_value_loss(
        vpreds=new,
        returns=torch.from_numpy(rows.reference),
        values=torch.from_numpy(rows.old),
        response_mask=torch.from_numpy(rows.mask).double(),
        cliprange_value=value_clip or 1e9,
    )
    ours, clipped = rows.our_value_loss(value_clip)
    assert_same(ours, _with_gradient(loss, new))
    assert clipped == pytest.approx(float(clip_fraction))
    assert (clipped > 0) == bool(value_clip)


def _mask(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy((np.arange(WIDTH) < lengths[:, None]).astype(np.float64))


def _at_the_end(rewards: np.ndarray, lengths: np.ndarray) -> Tensor:
    values = torch.zeros(len(rewards), WIDTH, dtype=torch.float64)
    values[torch.arange(len(rewards)), torch.from_numpy(lengths - 1)] = torch.from_numpy(rewards)
    return values
