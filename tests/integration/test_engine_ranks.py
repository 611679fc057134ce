"""Engines of several ranks: what they compute, and which weights they say that they hold."""

import json
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from engine_probes import KEY, transformers_class
from slimrl_tools.toy.toy import ToySize, write_toy
from small_models import WITH_EXPERTS

from slimrl.checkpoints.checkpoint_reader import read_whole
from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint, open_stored
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.wrapper import Stacking, wrapper_of
from slimrl.engines.servers.control import SglangControl
from slimrl.engines.servers.server import EngineServer
from slimrl.models.family import FAMILIES
from slimrl.models.fingerprint import fingerprint
from slimrl.models.hf_config import read_hf_config
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SIZE = ToySize(init_std=0.1)
TIMEOUT_S = 60.0
PROMPT = [3 + 17 * position % 250 for position in range(60)]


def layouts(family: str) -> list[tuple[int, int, int]]:
    """(tensor, expert, groups): groups where SGLang's model forms them, else more ranks than key-value heads."""
    name = {"qwen3_vl_moe": "qwen3_moe", "kimi_k25": "deepseek_v3"}.get(family, family)
    (row,) = (one for one in FAMILIES if one.name == name)
    groups = [(2, 1, 2), (4, 2, 2)] if row.attention_groups else [(4, 2, 1)]
    # SGLang loads the experts of gpt-oss into no engine that has them apart.
    return [one for one in [(1, 1, 1), (2, 1, 1), (2, 2, 1), *groups] if one[1] == 1 or family != "gpt_oss"]


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
@pytest.mark.parametrize(
    ("family", "tensor", "expert", "groups"),
    [(family, *layout) for family in (*WITH_EXPERTS, "qwen3_vl_moe", "kimi_k25") for layout in layouts(family)]
    + [("qwen3_5", *layout) for layout in [(1, 1, 1), (2, 1, 1), (2, 1, 2)]]
    + [(family, *layout) for family in ("qwen3", "qwen2", "llama") for layout in [(1, 1, 1), (2, 1, 1)]]
    + [("qwen3_vl", *layout) for layout in [(1, 1, 1), (2, 1, 1)]],
)
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
        prints = SglangControl("engine 0", server.url, timeout_s=TIMEOUT_S, key=KEY).fingerprints(None)
        named = shared_memory_of(server)
    finally:
        server.stop()
    # What has a name outlives an engine that is killed. The file of loads is known by its name, and removed.
    assert {path.name.split("@")[0] for path in named} == {"slimrl-loads"}
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
