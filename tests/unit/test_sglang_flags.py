"""An engine has the flags that SGLang knows, and kernels that leave weights as they are loaded."""

import ast

import pytest

from slimrl.config.package_fields import package_folder
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.sglang_verdicts import SGLANG_VERDICTS
from slimrl.config.verdicts import Verdict
from slimrl.data.engine_key import EngineKey
from slimrl.rollout.servers import server
from slimrl.rollout.servers.server import FLAGS, engine_arguments


def test_fields_have_the_flags_that_sglang_gives_them():
    """`cli_name` names a flag otherwise than its field, or repeats the common way of naming it."""
    named: dict[str, str] = {}
    for path in (package_folder("sglang") / "srt" / "arg_groups" / "fields").glob("*.py"):
        for field in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AnnAssign)):
            for call in ast.walk(field.annotation):
                words = call.keywords if isinstance(call, ast.Call) else []
                named |= {ast.unparse(field.target): ast.literal_eval(w.value) for w in words if w.arg == "cli_name"}
    other = {name: flag for name, flag in named.items() if flag != "--" + name.replace("_", "-")}
    aliased = {"tp_size", "ep_size"}
    given = {name for name, judgement in SGLANG_VERDICTS.items() if judgement.verdict is Verdict.safe} | aliased
    assert {name: flag for name, flag in other.items() if name in given - aliased} == FLAGS


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
    rollout = RolloutConfig(max_trajectory_tokens=100)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    server.EngineServer(
        0, rollout, tmp_path, tmp_path / "log", precision=Precision.bf16, cuda=True, port=7, key=EngineKey("k")
    )
    assert ("--moe-runner-backend" in started[0]) == packs
