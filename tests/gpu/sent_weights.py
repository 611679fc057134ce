"""Random weights that fill a given number of buckets, and a session that sends them."""

import torch
from machine import choose

from slimrl import device
from slimrl.config.schema.resync import ResyncConfig, TransportName, VerifyMode
from slimrl.resync.session import ResyncSession

RUN_ID = "gpu_suite"
MIB = 1 << 20


def bucket_bytes() -> int:
    return choose(64 * MIB, MIB // 16)


def weights(num_buckets: int) -> dict[str, torch.Tensor]:
    """Two tensors to a bucket, of two dtypes."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for number in range(num_buckets):
        for name, dtype, share in (("wide", torch.float32, 2), ("narrow", torch.bfloat16, 4)):
            rows = bucket_bytes() // share // dtype.itemsize // 64
            value = torch.randn(rows, 64, generator=generator).to(dtype)
            made[f"{name}.{number}"] = value.to(device.compute_device())
    return made


def session(source, engines, transport: TransportName = TransportName.ipc) -> ResyncSession:
    """The resync session of a trainer of one rank; every tensor of every version is compared."""
    config = ResyncConfig(transport=transport, bucket_bytes=bucket_bytes(), verify=VerifyMode.full, timeout_s=30.0)
    return ResyncSession(source, engines, config, rank=0, run_id=RUN_ID)
