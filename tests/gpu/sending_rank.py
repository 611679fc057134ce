"""A trainer's rank that sends the weights of a checkpoint to a running SGLang engine."""

from dataclasses import replace

from engine_probes import KEY
from machine import choose
from weight_cases import trainer_config
from weight_sender import WeightSender

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.config.schema.trainer import MtpConfig, ParallelConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.resync.session import ResyncSession
from slimrl.trainer.checkpointing.export import export_hf
from slimrl.trainer.worker import TrainerWorker

TIMEOUT_S = 90.0


def send_and_export(rank, world_size, port, url, model, out):
    """The names of tensors that differ after the resync, and seconds; the weights also go into a folder."""
    sender = WeightSender(rank, world_size, port, model, ParallelConfig(), Precision.bf16, timeout_s=TIMEOUT_S)
    sender.load(model)
    engine = SglangControl("engine 0", url, timeout_s=TIMEOUT_S, key=KEY)
    config = ResyncConfig(bucket_bytes=choose(32 << 20, 200_000), verify=VerifyMode.full, timeout_s=TIMEOUT_S)
    session = ResyncSession(sender.source, [engine], config, rank=rank, run_id="gpu_suite")
    report = session.run(1)
    session.close()
    export_hf(sender.source, model, out)
    sender.close()
    return report.mismatching, report.buckets, report.seconds


def send_with_drafts(rank, world_size, port, url, model):
    """The names of tensors that differ after a resync that also sends the layer for multi-token prediction."""
    trainer = replace(
        trainer_config(ParallelConfig()), mtp=MtpConfig(train=True), num_ranks=1, precision=Precision.bf16
    )
    worker = TrainerWorker(
        trainer, model, seed=0, rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=1,
    )  # fmt: skip
    worker.load_hf()
    engine = SglangControl("engine 0", url, timeout_s=TIMEOUT_S, updates_draft=True, key=KEY)
    config = ResyncConfig(bucket_bytes=choose(32 << 20, 200_000), verify=VerifyMode.full, timeout_s=TIMEOUT_S)
    session = ResyncSession(worker.weight_source(mtp=True), [engine], config, rank=rank, run_id="gpu_suite_drafts")
    report = session.run(1)
    session.close()
    worker.close()
    return report.mismatching
