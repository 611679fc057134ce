"""GPUs as torch describes them, and torch.cuda made to say that eight of one kind are there."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Card:
    name: str
    capability: tuple[int, int]
    gib: float
    processors: int
    """Streaming multiprocessors, by the data sheets"""
    shared_bytes: int
    """Shared memory that a block may ask for, by NVIDIA's programming guide"""


CARDS = {
    "A100": Card(name="NVIDIA A100-SXM4-80GB", capability=(8, 0), gib=79.15, processors=108, shared_bytes=163 * 1024),
    "H100": Card(name="NVIDIA H100 80GB HBM3", capability=(9, 0), gib=79.18, processors=132, shared_bytes=227 * 1024),
    "H200": Card(name="NVIDIA H200", capability=(9, 0), gib=139.8, processors=132, shared_bytes=227 * 1024),
    "B200": Card(name="NVIDIA B200", capability=(10, 0), gib=178.4, processors=148, shared_bytes=227 * 1024),
}

GPUS = 8


def pretend(card: Card) -> None:
    """Let torch.cuda, in this process, describe a node of such cards. It must not have been asked before."""
    import torch

    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=round(card.gib * GIB),
        multi_processor_count=card.processors,
        shared_memory_per_block_optin=card.shared_bytes,
        warp_size=32,
        L2_cache_size=50 * 1024**2,
        uuid="0",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "device_count": GPUS,
        "current_device": 0,
        "get_device_capability": card.capability,
        "get_device_name": card.name,
        "get_device_properties": properties,
        "mem_get_info": (properties.total_memory, properties.total_memory),
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "is_bf16_supported": True,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
