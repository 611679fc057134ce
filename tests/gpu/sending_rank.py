"""A trainer's rank that sends the weights of a checkpoint to a running SGLang engine."""

from machine import choose
from weight_sender import WeightSender

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.resync.session import ResyncSession
from slimrl.rollout.servers.control import SglangControl
from slimrl.trainer.checkpointing.export import export_hf

TIMEOUT_S = 90.0


def send_and_export(rank, world_size, port, url, model, out):
    """The names of tensors that differ after the resync, and seconds; the weights also go into a folder."""
    sender = WeightSender(rank, world_size, port, model, ParallelConfig(), Precision.bf16, timeout_s=TIMEOUT_S)
    sender.load(model)
    engine = SglangControl("engine 0", url, timeout_s=TIMEOUT_S)
    config = ResyncConfig(bucket_bytes=choose(32 << 20, 200_000), verify=VerifyMode.full, timeout_s=TIMEOUT_S)
    session = ResyncSession(sender.source, [engine], config, rank=rank, run_id="gpu_suite")
    report = session.run(1)
    session.close()
    export_hf(sender.source, model, out)
    sender.close()
    return report.mismatching, report.buckets, report.seconds
