"""Which regions of which Hugging Face tensors a rank of an engine keeps, and where in its parameters.

The trainer asks for the regions through SGLang's /weights_checker, with the action `slimrl_kept`: each rank answers
for itself (weight_fingerprints.py has the hook). engine_layout.py says what a parameter holds.
"""

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from slimrl.data.boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

KEPT = "slimrl_kept"


class KeptRegion(NamedTuple):
    box: Box
    """The region of the whole tensor, without padding"""
    memory: "Tensor"
    """View of the parameter, whose first element is that of the region; padding may follow in each dimension"""


def kept_regions(model: Any) -> dict[str, list[KeptRegion]]:
    """What this process keeps of each Hugging Face tensor, by name."""
    from sglang.srt.runtime_context import get_parallel

    from slimrl.engines.plugin.weight_updates import named_parameters
    from slimrl.models.engine_layout import engine_slices
    from slimrl.models.engine_slice import EngineShape

    parallel = get_parallel()
    rank, num_ranks = parallel.tp_group.rank_in_group, parallel.tp_group.world_size
    shape = EngineShape.of_config(model.config, num_ranks, parallel.moe_ep_size, parallel.attn_dp_size)
    regions: dict[str, list[KeptRegion]] = {}
    for engine_name, parameter in named_parameters(model):
        for piece in engine_slices(engine_name, shape):
            held = piece.holding(rank, num_ranks)
            if held is not None:
                memory = piece.of(parameter.detach())
                box = piece.box(memory, held)
                if all(start < stop for start, stop in box):
                    regions.setdefault(piece.hf_name, []).append(KeptRegion(box, memory))
    return regions


def kept_report(model: Any) -> dict[str, str]:
    """JSON of each rank's boxes by name, by the rank's number. All ranks of an engine call it together."""
    from slimrl.engines.plugin.engine_ranks import EngineRanks

    boxes = {name: [region.box for region in regions] for name, regions in kept_regions(model).items()}
    answers = EngineRanks().exchange(json.dumps(boxes, separators=(",", ":")))
    return {str(rank): answer for rank, answer in enumerate(answers)}


def parse_kept(report: dict[str, str]) -> list[dict[str, list[Box]]]:
    """The boxes of each rank by name, from `kept_report`."""
    ranks = [json.loads(report[str(rank)]) for rank in range(len(report))]
    return [
        {name: [tuple((start, stop) for start, stop in box) for box in boxes] for name, boxes in one.items()}
        for one in ranks
    ]
