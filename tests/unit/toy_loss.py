"""A user's loss, by its import path."""

import torch

from slimrl.api import TokenLosses


def unmasked(tokens, settings, log_ratio_N):
    """The plain policy gradient, NaN where nothing was sampled."""
    loss_T = -tokens.advantages_T * tokens.logprobs_T
    loss_T = torch.where(tokens.mask_T, loss_T, torch.nan)
    return TokenLosses(loss_T=loss_T, clipped_T=torch.zeros_like(tokens.mask_T))
