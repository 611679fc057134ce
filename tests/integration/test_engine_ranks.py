"""Engines of several ranks: what they compute, and which weights they say that they hold."""

import json
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from engine_layouts import ENGINE_LAYOUTS
from engine_probes import KEY, transformers_class
from slimrl_tools.toy.toy import ToySize, write_toy

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint, open_stored
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.wrapper import Stacking, wrapper_of
from slimrl.data.boxes import elements
from slimrl.data.model_weights import EngineModel
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.estimates.resync.engine_regions import planned_kept
from slimrl.models.family import family_of
from slimrl.models.fingerprint import fingerprint
from slimrl.models.hf_config import read_hf_config
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SIZE = ToySize(init_std=0.1)
TIMEOUT_S = 60.0
CPU_MULTIPLE = 32
"""To which SGLang pads the shards of experts and of dense layers on a CPU."""
PROMPT = [3 + 17 * position % 250 for position in range(60)]


def engine_logprobs(url: str, length: int, group: int = 0) -> torch.Tensor:
    """float32 [length - 1]: of each token of the prompt's beginning but the first, by a group of the engine's ranks."""
    body = {
        "input_ids": PROMPT[:length],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "routed_dp_rank": group,
    }
    answer = (
        httpx.post(f"{url}/generate", json=body, headers=KEY.headers, timeout=TIMEOUT_S, trust_env=False)
        .raise_for_status()
        .json()
    )
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


def shared_memory_of(server: EngineServer) -> set[Path]:
    """Files in /dev/shm that the engine's processes map and that still have their names."""
    root = psutil.Process(server.process.pid)
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in (root, *root.children(recursive=True))]
    paths = {line.split(maxsplit=5)[5] for text in maps for line in text.splitlines() if str(SHARED_MEMORY_DIR) in line}
    return {Path(path) for path in paths if not path.endswith(" (deleted)")}


@pytest.mark.full
@pytest.mark.parametrize(("family", "tensor", "expert", "groups"), ENGINE_LAYOUTS)
def test_an_engine_of_several_ranks_computes_with_and_names_the_checkpoints_weights(
    tmp_path, family, tensor, expert, groups
):
    path = tmp_path / "model"
    write_toy(family, path, SIZE, seed=0)
    compare_engine(path, tensor, expert, groups)


def test_an_engine_reads_experts_that_are_stacked_as_in_a_release(tmp_path):
    path = tmp_path / "model"
    # Those of the other toys are stacked in the other order, since their down projections are square.
    write_toy("qwen3_vl_moe", path, ToySize(layers=2, init_std=0.1, moe_intermediate=64), seed=0)
    with open_stored(path) as folder:
        assert folder.layout.stacking is Stacking.inputs_first
    compare_engine(path)


def test_an_engine_computes_positions_that_are_not_scaled(tmp_path):
    path = tmp_path / "model"
    write_toy("deepseek_v3", path, SIZE, seed=0)
    # As in Moonlight; toys of this family have scaled positions.
    (path / "config.json").write_text(json.dumps(read_hf_config(path) | {"rope_scaling": None}))
    compare_engine(path)


def compare_engine(path, tensor=1, expert=1, groups=1):
    """Log-probs and fingerprints of an engine with these numbers of ranks, against the checkpoint's in transformers."""
    rollout = RolloutConfig(
        engine_tp=tensor,
        engine_ep=expert,
        engine_attention_dp=groups,
        max_trajectory_tokens=128,
        sglang={"max_total_tokens": 4096},
    )
    server = EngineServer(0, rollout, path, path.parent / "engine.log", precision=Precision.fp32, key=KEY)
    try:
        server.wait_ready()
        # A request of one or two tokens has too few pairs of token and expert for the batched products.
        logprobs = {
            (length, group): engine_logprobs(server.url, length, group)
            for length in (2, len(PROMPT))
            for group in range(groups)
        }
        control = SglangControl("engine 0", server.url, timeout_s=TIMEOUT_S, key=KEY)
        prints, kept = control.fingerprints(None), control.kept(EngineModel.target)
        named = shared_memory_of(server)
    finally:
        server.stop()
    # What has a name outlives an engine that is killed. The file of loads is known by its name, and removed.
    assert {path.name.split("@")[0] for path in named} == {"slimrl-loads"}
    compare_kept(path, kept, expert, groups)
    with open_hf_checkpoint(path) as reader:
        tensors = {name: read_whole(reader, name) for name in reader.specs}
    if wrapper_of(read_hf_config(path)):
        assert set(prints) == set(tensors)
    assert {name: prints.get(name) for name in tensors} == {name: fingerprint(tensors[name]) for name in tensors}
    model = transformers_class(path).from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected_T = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    expected_T = expected_T.gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    for (length, group), values in logprobs.items():
        assert (values - expected_T[: length - 1]).abs().max() < 2e-5, (length, group)


def compare_kept(path, kept, expert, groups):
    """What each rank of an engine says that it keeps, against what slimrl plans for it from config.json alone."""
    hf_config = read_hf_config(path)
    specs = family_of(hf_config).weight_map(hf_config).without_copies().specs(Precision.fp32.dtype)
    planned = planned_kept(
        specs,
        hf_config,
        tensor_parallel=len(kept),
        expert_parallel=expert,
        attention_data_parallel=groups,
    )
    assert kept[0]
    shapes = {spec.name: spec.shape for spec in specs}
    for rank, (real, guess) in enumerate(zip(kept, planned, strict=True)):
        for name, boxes in guess.items():
            said = sorted(real.get(name, ()))
            if said != sorted(boxes):
                # On a CPU SGLang pads widths of which ranks have shards, so the first ranks have more of them.
                # Rows of gate and up alternate in one tensor of gpt-oss.
                multiple = 2 * CPU_MULTIPLE if "gate_up_proj" in name else CPU_MULTIPLE
                of_ranks = [one.get(name, ()) for one in planned]
                padded = [padded_box(box, of_ranks, shapes[name], multiple) for box in boxes]
                assert said == [box for box in padded if elements(box)], (rank, name)
        assert {name for name in real if name in shapes} <= guess.keys(), rank


def padded_box(box, of_ranks, shape, multiple):
    """The region of a rank if the shards of each dimension had a multiple of a size."""
    edges = []
    for dimension, (edge, size) in enumerate(zip(box, shape, strict=True)):
        shards = sorted({one[dimension] for boxes in of_ranks for one in boxes})
        step = -(-size // (len(shards) * multiple)) * multiple if len(shards) > 1 else size
        first = shards.index(edge) * step
        edges.append((min(first, size), min(first + step, size)))
    return tuple(edges)
