"""Where whole experts lie in an engine's parameters, so that they can be received straight into them.

An expert's matrix is a block of a fused parameter. Where one rank holds it whole, unpadded and in one piece, its bytes
can come there from the network, without a buffer and a copy between.
"""

from typing import Any

from torch import Tensor


def expert_places(model: Any) -> dict[str, Tensor]:
    """Views of the parameters by Hugging Face name: matrices of experts that this process holds contiguous and whole.

    Padded ones are among them, with their padded shape.
    """
    from sglang.srt.runtime_context import get_parallel

    from slimrl.models.engine_layout import EngineShape, engine_slices

    parallel = get_parallel()
    rank, num_ranks = parallel.tp_group.rank_in_group, parallel.tp_group.world_size
    shape = EngineShape.of_config(model.config, num_ranks, parallel.moe_ep_size)
    places = {}
    for engine_name, parameter in model.named_parameters():
        for piece in engine_slices(engine_name, shape):
            if piece.expert is None:
                continue
            held = piece.holding(rank, num_ranks)
            if held is None or held.shards > 1:
                continue
            view = piece.of(parameter.detach())
            if view.is_contiguous():
                places[piece.hf_name] = view
    return places
