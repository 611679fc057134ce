"""What the ranks of an engine keep, in bytes: the measure of what each of them should receive."""

from collections.abc import Mapping

from slimrl.checkpoints.safetensors_file import element_bytes
from slimrl.data.boxes import elements
from slimrl.data.model_weights import EngineModel, WeightSource
from slimrl.engines.servers.control import SglangControl


def tensor_bytes(source: WeightSource) -> dict[str, int]:
    """Bytes of an element of each tensor."""
    return {spec.name: element_bytes(spec.dtype) for spec in source.layout()}


def kept_bytes(control: SglangControl, sizes: Mapping[str, int]) -> list[int]:
    """Bytes of what each rank of an engine keeps.

    Args:
        sizes: bytes of an element of each tensor.
    """
    ranks = control.kept(EngineModel.target)
    assert {name for kept in ranks for name in kept} == sizes.keys()
    return [sum(elements(box) * sizes[name] for name, boxes in kept.items() for box in boxes) for kept in ranks]
