"""An engine has the flags that SGLang knows, and kernels that leave weights as they are loaded."""

import argparse
import re
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs

from slimrl.config.package_fields import FieldType, sglang_fields
from slimrl.config.passthrough import VERDICTS, field_problem
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.verdicts import Judgement, Verdict
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers import server
from slimrl.engines.servers.server import engine_arguments

SAMPLES = {
    "cuda_graph_config": {"decode": {"backend": "full"}},
    "radix_eviction_policy_config": {"protected_threshold": 4},
    "extra_metric_labels": {"team": 'it\'s "ours"'},
    "lora_paths": [{"lora_name": "a", "lora_path": "b"}],
}
"""Values of fields whose type does not tell one"""


def samples(action: argparse.Action, field: FieldType, judgement: Judgement) -> list[Any]:
    """Values that a recipe may give a field."""
    known = [value for value in judgement.values or action.choices or () if value not in (None, "none")]
    if known or action.dest in SAMPLES:
        return [max(known) if known else SAMPLES[action.dest]]
    if bool in field.types:
        return [True, False]
    kinds = {"int": [1, 2], "float": [0.5, 2.0], "str": ["a", "b"]}
    values = next(values for kind, values in kinds.items() if re.search(rf"\b{kind}\b", field.text))
    return [values] if list in field.types else values


@pytest.mark.parametrize("section", ["rollout.sglang", "teacher.sglang"])
def test_whatever_a_recipe_may_set_reaches_sglang(section: str):
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = {action.dest: action for action in reversed(parser._actions)}  # Aliases come last.
    fields, how = sglang_fields(), {"host": "h", "port": 7, "precision": Precision.bf16, "cuda": True, "seed": 5}
    safe = {name: judgement for name, judgement in VERDICTS[section].items() if judgement.verdict is Verdict.safe}
    for name, judgement in safe.items():
        for value in samples(actions[name], fields[name], judgement):
            assert field_problem(section, name, value, fields) is None
            rollout = RolloutConfig(max_trajectory_tokens=100, sglang={name: value})
            found = getattr(parser.parse_args(engine_arguments(rollout, "m", **how)), name)
            # Without a flag for false, what SGLang takes is false or nothing.
            stays_off = value is False and not isinstance(actions[name], argparse.BooleanOptionalAction)
            assert not found if stays_off else found == value, name


def test_a_gpu_on_which_sglang_would_pack_weights_gets_kernels_that_do_not():
    def words(plain: bool, **given: str) -> list[str]:
        rollout = RolloutConfig(max_trajectory_tokens=100, sglang=given)
        how = {"host": "h", "port": 7, "precision": Precision.bf16, "cuda": True, "seed": 5}
        return engine_arguments(rollout, "m", **how, plain=plain)

    assert not {"--moe-runner-backend", "--fp8-gemm-backend"} & set(words(False))
    for found in (words(True), words(True, moe_runner_backend="triton")):
        assert found[found.index("--moe-runner-backend") + 1] == "triton"
        assert found[found.index("--fp8-gemm-backend") + 1] == "triton"
        assert found.count("--moe-runner-backend") == 1
    for value in ("auto", "deep_gemm"):
        with pytest.raises(ValueError, match=rf"^rollout.sglang.fp8_gemm_runner_backend: {value} stores weights"):
            words(True, fp8_gemm_runner_backend=value)
    assert "deep_gemm" in words(False, fp8_gemm_runner_backend="deep_gemm")


@pytest.mark.parametrize("packs", [False, True])
def test_an_engine_asks_its_machine_for_the_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path, packs: bool):
    started = []
    monkeypatch.setattr(server, "ServerProcess", lambda name, command, env, log, **how: started.append(command))
    monkeypatch.setattr(server.device, "packs_engine_weights", lambda: packs)
    monkeypatch.setattr(server, "is_block_fp8", lambda path: False)
    monkeypatch.setattr(server, "is_packed_int4", lambda path: False)
    rollout = RolloutConfig(max_trajectory_tokens=100)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    server.EngineServer(
        0, rollout, tmp_path, tmp_path / "log", precision=Precision.bf16, cuda=True, port=7, key=EngineKey("k")
    )
    assert ("--moe-runner-backend" in started[0]) == packs
