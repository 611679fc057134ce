"""Gathering from real trainer ranks, on one node and on several, into engines that live in the senders' processes."""

import os

import pytest
import torch.distributed as dist
from memory_engine import MemoryEngine
from ranks import run_ranks
from safetensors.torch import load_file
from small_models import small_model
from weight_cases import MOE_LAYOUTS_OF_4, change_layout, join, loaded_chunks

from slimrl.config.schema import ParallelConfig, ResyncConfig, VerifyMode
from slimrl.models.shared_segment import SHARED_MEMORY_DIR
from slimrl.resync.session import ResyncSession
from slimrl.trainer.weight_source import MegatronWeightSource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TIMEOUT_S = 30.0
BUCKET_BYTES = 10_000
"""Less than the embedding, which is cut into rows."""
FLUSH_S = 0.3
"""Of each engine's cache, at the second version."""


def resync_to_all_nodes(rank, world_size, port, path, layouts, placements):
    """Every layout under every placement: (node of each rank, nodes of engines), all as strings of letters."""
    join(rank, world_size, port)
    expected = load_file(path / "model.safetensors")
    sent = {}
    for layout_name, parallel in layouts.items():
        change_layout(parallel)
        chunks, family, hf_config = loaded_chunks(path, parallel)
        source = MegatronWeightSource(chunks, family, hf_config)
        for nodes, engine_nodes in placements:
            engines = [MemoryEngine(f"engine {i}", node) for i, node in enumerate(engine_nodes)]
            config = ResyncConfig(bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
            session = ResyncSession(source, engines, config, rank=rank, run_id=f"nodes-{nodes}", node=nodes[rank])
            for version in (1, 2):
                report = session.run(version)
                for engine in engines:
                    engine.flush_s = FLUSH_S
            session.close()
            mine = [engine for engine in engines if nodes.index(engine.place.nodes[0]) == rank]
            for engine in mine:
                assert engine.loaded.keys() == expected.keys()
                for name, value in engine.loaded.items():
                    assert value.equal(expected[name]), (layout_name, nodes, name)
                assert (engine.version, engine.serves) == (2, True)
            if rank == 0:
                assert (report.mismatching, report.failed_engines) == ((), {})
                assert report.verified_tensors == len(expected) * len(engines)
                # Ranks without engines wait for the flush; that is no part of the verification.
                assert report.stage_seconds["verify"] + FLUSH_S < report.seconds
                assert report.transfer_seconds > FLUSH_S
                assert report.peak_extra_bytes <= 2 * BUCKET_BYTES
                sent[layout_name, nodes] = report.buckets
    dist.destroy_process_group()
    left = list(SHARED_MEMORY_DIR.glob(f"slimrl-nodes-*-{os.getpid()}-*"))
    assert left == []
    return sent


PLACEMENTS = [("aaaa", "a"), ("aabb", "ab"), ("abab", "b"), ("abcd", "abcd")]


@pytest.mark.parametrize(
    ("family_name", "layouts"),
    [
        ("qwen3_moe", {"pp2_ep2": ParallelConfig(pipeline=2, expert=2)}),
        pytest.param("qwen3_moe", MOE_LAYOUTS_OF_4, marks=pytest.mark.full),
        pytest.param("deepseek_v3", MOE_LAYOUTS_OF_4, marks=pytest.mark.full),
    ],
)
def test_each_node_s_engines_get_the_checkpoint_s_bytes_wherever_the_ranks_are(tmp_path, family_name, layouts):
    path = small_model(family_name, tmp_path / "hf")
    reports, *_ = run_ranks(resync_to_all_nodes, 4, path, layouts, PLACEMENTS, timeout_s=150)
    assert len(reports) == len(layouts) * len(PLACEMENTS)
    assert min(reports.values()) > 2
