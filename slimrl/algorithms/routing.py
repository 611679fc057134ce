"""Where trainer and engine chose different experts for the same tokens, and how that changed the log-probs.

If two experts' router scores nearly tie, rounding may make trainer and engine choose differently: a flip.
T positions of a micro-batch, L layers, K experts per token. Position t reads token t and predicts the next one.
Layer l at position t depends on the experts of lower layers at positions up to t of the same sequence. So a flip at
(t, l)

- reaches the log-prob predicted at t, and those predicted later in the sequence unless l is the last layer, above which
  there is no attention;
- may cause flips in higher layers, at t and later. A flip without a flip in a lower layer at t or earlier is a first
  flip: only rounding can cause it, so its margin must be tiny. Other flips may have any margin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slimrl.data.packing import MicroBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingComparison:
    """Flips of the routing in one micro-batch."""

    num_flips: int
    """Number of tokens with different sets of experts in some layer"""
    num_differing: int
    """Number of pairs of a token and a layer with different sets of experts"""
    num_compared: int
    """Number of pairs of a token and a layer for which both report experts"""
    reached_S: np.ndarray
    """bool, sampled tokens whose log-prob a flip reaches, or may reach because the engine did not report experts"""
    first_margins: np.ndarray
    """float32, the trainer's margin at each first flip"""


def engine_experts(batch: MicroBatch, shape: tuple[int, int, int]) -> np.ndarray:
    """int16 [T, L, K], the engine's experts of a micro-batch, to replay.

    Args:
        shape: (L, K, E) of the model.

    Raises:
        ValueError: the engine reported no experts, or not those of this model.
    """
    experts_TLK, (layers, topk, experts) = batch.routed_experts, shape
    if experts_TLK is None:
        raise ValueError(
            "algorithm.routing_replay: rollout needs trajectories with routed_experts, and these have none. Sample "
            "them with rollout.routed_experts: true, or use another routing_replay."
        )
    if experts_TLK.shape[1:] != (layers, topk):
        raise ValueError(f"the engine reports experts of shape {experts_TLK.shape[1:]}, the model has {(layers, topk)}")
    if (largest := int(experts_TLK.max(initial=-1))) >= experts:
        raise ValueError(f"the engine reports expert {largest}, and the model has {experts}")
    return experts_TLK


def compare_routing(
    engine_TLK: np.ndarray, trainer_TLK: np.ndarray, margin_TL: np.ndarray, cu_seqlens: np.ndarray, mask_T: np.ndarray
) -> RoutingComparison:
    """Compare the sets of experts; the order within a set does not matter.

    Args:
        engine_TLK: the engine's experts, -1 where it reported none.
        trainer_TLK: the trainer's experts, -1 throughout a layer without experts, which is left out.
        margin_TL: how far the trainer was from choosing another expert.
        cu_seqlens: int, boundaries of the sequences.
        mask_T: bool, positions whose target was sampled.

    Raises:
        ValueError: engine and trainer report different numbers of layers or experts.
    """
    if engine_TLK.shape != trainer_TLK.shape:
        raise ValueError(f"the engine reports experts of shape {engine_TLK.shape}, the trainer {trainer_TLK.shape}")
    routed_TL = (trainer_TLK >= 0).any(-1)
    reported_TL = (engine_TLK >= 0).any(-1)
    differs_TL = (np.sort(engine_TLK, axis=-1) != np.sort(trainer_TLK, axis=-1)).any(-1)
    flips_TL = routed_TL & reported_TL & differs_TL
    unsure_TL = flips_TL | (routed_TL & ~reported_TL)
    reached_T = np.zeros(len(flips_TL), np.bool_)
    first_TL = np.zeros_like(flips_TL)
    for start, end in pairwise(cu_seqlens.tolist()):
        reached_T[start:end] = _reached(unsure_TL[start:end])
        first_TL[start:end] = flips_TL[start:end] & ~_follows(flips_TL[start:end])
    return RoutingComparison(
        num_flips=int(flips_TL.any(1).sum()),
        num_differing=int(flips_TL.sum()),
        num_compared=int((routed_TL & reported_TL).sum()),
        reached_S=reached_T[mask_T],
        first_margins=margin_TL[first_TL],
    )


def routing_metrics(
    comparisons: Sequence[RoutingComparison], difference_S: np.ndarray, own_S: np.ndarray
) -> dict[str, float]:
    """Metrics of a step; those without data are left out.

    Args:
        comparisons: of all micro-batches.
        difference_S: float64, absolute difference between trainer's and engine's log-probs of the sampled tokens.
        own_S: bool, those among them that the trainer's weights sampled; the others differ without a flip.
    """
    reached_S = np.concatenate([comparison.reached_S for comparison in comparisons])
    metrics = {
        "mismatch/routing_flips": float(sum(comparison.num_flips for comparison in comparisons)),
        "mismatch/flip_reached_fraction": float(reached_S.mean()),
    }
    if compared := sum(comparison.num_compared for comparison in comparisons):
        metrics["routing/differs_fraction"] = sum(comparison.num_differing for comparison in comparisons) / compared
    margins = np.concatenate([comparison.first_margins for comparison in comparisons])
    if len(margins):
        metrics["mismatch/flip_margin_max"] = float(margins.max())
    unflipped_S = own_S & ~reached_S
    if unflipped_S.any():
        metrics["mismatch/logprob_abs_mean_unflipped"] = float(difference_S[unflipped_S].mean())
    return metrics


def _reached(flips_TL: np.ndarray) -> np.ndarray:
    """bool [T]: a flip at the position itself, or below the last layer at an earlier one."""
    return flips_TL.any(1) | np.logical_or.accumulate(flips_TL[:, :-1].any(1))


def _follows(flips_TL: np.ndarray) -> np.ndarray:
    """bool [T, L]: a flip in a lower layer at this position or an earlier one."""
    so_far_TL = np.logical_or.accumulate(flips_TL, axis=0)
    below_TL = np.zeros_like(flips_TL)
    below_TL[:, 1:] = np.logical_or.accumulate(so_far_TL, axis=1)[:, :-1]
    return below_TL
