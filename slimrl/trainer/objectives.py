"""The loss functions of slimrl.algorithms in the form that a trainer's update takes."""

from torch import Tensor

from slimrl.algorithms.losses import cross_entropy, gspo_loss
from slimrl.config.schema import AlgorithmConfig
from slimrl.trainer.local_batch import LocalBatch
from slimrl.trainer.step import LossFunction

Sums = tuple[Tensor, dict[str, Tensor]]


def gspo_objective(algorithm: AlgorithmConfig) -> LossFunction:
    """GSPO over a batch with old log-probs; the denominator is its number of trajectories."""

    def objective(logprobs_T: Tensor, entropy_T: Tensor, batch: LocalBatch) -> Sums:
        assert batch.old_logprobs_T is not None, "old log-probs are filled in before an update"
        sums = gspo_loss(
            logprobs_T,
            batch.old_logprobs_T,
            batch.mask_T,
            batch.trajectory_ids_T,
            batch.advantages_N,
            batch.num_sampled_N,
            batch.elsewhere_log_ratio_N,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            sum_over_ranks=batch.sum_over_ranks,
        )
        return sums.loss, sums.reported

    return objective


def sft_objective() -> LossFunction:
    """Cross-entropy of the tokens to learn from; the denominator is their number."""

    def objective(logprobs_T: Tensor, entropy_T: Tensor, batch: LocalBatch) -> Sums:
        sums = cross_entropy(logprobs_T, batch.mask_T)
        return sums.loss, sums.reported

    return objective
