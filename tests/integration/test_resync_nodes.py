"""Gathering from real trainer ranks, on one node and on several, into engines that live in the senders' processes."""

import os

import pytest
import torch
import torch.distributed as dist
from memory_engine import MemoryEngine
from ranks import run_ranks
from safetensors.torch import load_file
from small_models import small_model
from weight_cases import MOE_LAYOUTS_OF_4, change_layout, join, loaded_chunks

from slimrl.config.schema.resync import ResyncConfig, VerifyMode
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.data.peer_messages import ALIGNMENT
from slimrl.quantization.fp8 import BlockFp8, quantize
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.report import ResyncError
from slimrl.resync.session import ResyncSession
from slimrl.resync.transform import Quantize
from slimrl.trainer.weight_source import MegatronWeightSource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TIMEOUT_S = 30.0
BUCKET_BYTES = 10_000
"""Less than the embedding, which is cut into rows."""
ALIGNED_BYTES = 8 * ALIGNMENT
"""By which a rank's buffers are larger than a bucket, as messages begin at multiples of ALIGNMENT"""
FLUSH_S = 0.3
"""How long each engine's cache flush takes, at the second version."""


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
            engines = [MemoryEngine(f"engine {i}", node, source.layout()) for i, node in enumerate(engine_nodes)]
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
                # Slots of a receiver, and what it stages for other nodes.
                assert report.peak_extra_bytes <= 2 * BUCKET_BYTES + ALIGNED_BYTES
                sent[layout_name, nodes] = report.buckets
    dist.destroy_process_group()
    left = list(SHARED_MEMORY_DIR.glob(f"slimrl-nodes-*-{os.getpid()}-*"))
    assert left == []
    return sent


PLACEMENTS = [("aaaa", "a"), ("aabb", "ab"), ("abab", "b"), ("abcd", "abcd")]


@pytest.mark.full
@pytest.mark.parametrize("family_name", ["qwen3_moe", "deepseek_v3"])
def test_each_node_s_engines_get_the_checkpoint_s_bytes_wherever_the_ranks_are(tmp_path, family_name):
    path = small_model(family_name, tmp_path / "hf")
    reports, *_ = run_ranks(resync_to_all_nodes, 4, path, MOE_LAYOUTS_OF_4, PLACEMENTS, timeout_s=150)
    assert len(reports) == len(MOE_LAYOUTS_OF_4) * len(PLACEMENTS)
    assert min(reports.values()) > 2


FP8 = BlockFp8(block=(16, 8))
POISONED = "model.layers.1.mlp.experts.3.down_proj.weight"
"""On the second half of the ranks"""


def resync_quantised(rank, world_size, port, path, parallel, placements):
    """Bytes that this rank sent to other ranks, by placement. The last resync is of infinity."""
    join(rank, world_size, port)
    expected = load_file(path / "model.safetensors")
    change_layout(parallel)
    chunks, family, hf_config = loaded_chunks(path, parallel)
    source = MegatronWeightSource(chunks, family, hf_config)
    quantised = {name for name in expected if "_proj" in name}
    assert POISONED in quantised
    transform = Quantize(FP8, quantised)
    sent = [0]
    run_operations = dist.batch_isend_irecv

    def counting(operations):
        sent[0] += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return run_operations(operations)

    dist.batch_isend_irecv = counting
    found = {}
    for nodes, engine_nodes in placements:
        specs = [tensor.spec for tensor in sent_tensors(source.layout(), transform)]
        engines = [MemoryEngine(f"engine {i}", node, specs) for i, node in enumerate(engine_nodes)]
        config = ResyncConfig(bucket_bytes=BUCKET_BYTES, verify=VerifyMode.full, timeout_s=TIMEOUT_S)
        session = ResyncSession(
            source, engines, config, rank=rank, run_id=f"nodes-{nodes}", node=nodes[rank],
            transform=transform,
        )  # fmt: skip
        for version in (1, 2):
            sent[0] = 0
            report = session.run(version)
        found[nodes] = sent[0]
        for engine in engines:
            if nodes.index(engine.place.nodes[0]) != rank:
                continue
            for name, value in expected.items():
                if name in quantised:
                    codes, scale = quantize(value, FP8.block)
                    assert engine.loaded[name].view(torch.uint8).equal(codes.view(torch.uint8)), (nodes, name)
                    assert engine.loaded[name + "_scale_inv"].equal(scale), (nodes, name)
                else:
                    assert engine.loaded[name].equal(value), (nodes, name)
        if rank == 0:
            assert (report.mismatching, report.failed_engines) == ((), {})
            assert report.verified_tensors == (len(expected) + len(quantised)) * len(engines)
        if nodes == placements[-1][0]:
            if rank == world_size - 1:
                source.groups(POISONED).fill_(float("inf"))
            with pytest.raises(ResyncError, match=f"{POISONED}: the matrix holds NaN or infinity"):
                session.run(3)
        session.close()
    dist.destroy_process_group()
    assert list(SHARED_MEMORY_DIR.glob(f"slimrl-nodes-*-{os.getpid()}-*")) == []
    return found


@pytest.mark.full
def test_nodes_send_each_other_quantised_weights_from_all_of_their_ranks(tmp_path):
    path = small_model("qwen3_moe", tmp_path / "hf")
    placements = [("abcd", "abcd"), ("aabb", "a")]
    by_rank = run_ranks(resync_quantised, 4, path, ParallelConfig(expert=4), placements, timeout_s=150)
    half = [found["aabb"] for found in by_rank]
    assert half[:2] == [0, 0]
    # Of the experts, half of which are on node b, one byte of four, and scales of four bytes for 128 values.
    experts = [value for name, value in load_file(path / "model.safetensors").items() if ".experts." in name]
    codes = sum(value.numel() for value in experts) // 2
    scales = sum(4 * -(-value.shape[0] // 16) * -(-value.shape[1] // 8) for value in experts) // 2
    # What ranks of node a hold too, they send.
    assert sum(half) == codes + scales
    assert half[2] == half[3]
