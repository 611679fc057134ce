"""Tensors that are larger than a bucket, in engines that compute with something which they derive from them."""

import pytest
from checkpoint_source import CheckpointSource
from engine_probes import KEY, serves
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl import device
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.resync.session import ResyncSession

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(device.device_type() == "cuda", reason="the source here is in host memory"),
]

BUCKET_BYTES = 45_000
"""Less than kv_b_proj has, more than q_a and kv_a have together."""
TIMEOUT_S = 60.0


@pytest.mark.full
def test_latent_attention_computes_with_keys_and_values_that_came_in_rows(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for seed, path in enumerate((first, second)):
        write_toy("deepseek_v3", path, ToySize(init_std=0.1), seed)
    source = CheckpointSource(second)
    split = [spec for spec in source.specs if spec.name.endswith("kv_b_proj.weight")]
    assert split
    assert all(source.weights[spec.name].nbytes > BUCKET_BYTES for spec in split)
    rollout = RolloutConfig(max_trajectory_tokens=128, sglang={"max_total_tokens": 4096})
    server = EngineServer(0, rollout, first, tmp_path / "engine.log", precision=Precision.fp32, key=KEY)
    try:
        server.wait_ready()
        assert serves(server.url, first)
        engine = SglangControl("engine 0", server.url, timeout_s=TIMEOUT_S, key=KEY)
        config = ResyncConfig(bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
        session = ResyncSession(source, [engine], config, rank=0, run_id="split")
        report = session.run(1)
        session.close()
        engine.close()
        assert report.mismatching == ()
        assert serves(server.url, second)
    finally:
        server.stop()
