"""Matrices that leave nothing of block FP8 untried."""

import torch


def hard_matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values over many binades, with zeros, negative zeros, a tile of zeros and one of values too small to count."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.exp(
        2 * torch.randn(rows, columns, generator=generator)
    )
    weight[0, 0], weight[-1, -1] = 0.0, -0.0
    weight[: rows // 3, : columns // 3] = 0.0
    weight[rows // 2 : rows // 2 + 3] *= 1e-14
    return weight.to(dtype)
