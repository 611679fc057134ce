"""Environment variables of trainer and engines, against what SGLang sets in its own processes."""

import ast
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from slimrl.config.env_vars import FP8_SCALES, engine_variables, nccl_variables, thread_variables, trainer_variables
from slimrl.config.schema.precision import Fp8Scaling
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName

SGLANG = Path(find_spec("sglang").submodule_search_locations[0]) / "srt"
NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")
CHANNELS = ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")


def recipe_of(transport: TransportName = TransportName.p2p, **sglang) -> Recipe:
    recipe = Recipe()
    recipe.resync.transport, recipe.rollout.sglang = transport, sglang
    return recipe


class Enough(Exception):
    """Raised once SGLang has set enough of the environment."""


class Environment(dict):
    def __setitem__(self, name, value):
        if name == "CUDA_DEVICE_MAX_CONNECTIONS":
            raise Enough
        super().__setitem__(name, value)


@pytest.fixture(scope="module")
def set_by_sglang():
    """What an engine's processes have for NCCL after SGLang's start, from this environment; its own code says so."""
    source = (SGLANG / "entrypoints/engine.py").read_text()
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "_set_envs_and_config"
    )
    function.args.args[0].annotation = None
    defaults = {
        "nnodes": 1, "enable_kv_cache_sharding": False, "enable_memory_saver": False, "enable_symm_mem": False,
        "enable_nccl_nvls": False, "dcp_size": 1,
    }  # fmt: skip

    def run(environment, **fields):
        given = Environment(environment)
        names = {
            "os": SimpleNamespace(environ=given), "logger": logging.getLogger(), "resolving_view": lambda cfg: cfg,
            "envs": SimpleNamespace(
                SGLANG_ENABLE_KV_SHARD_ZERO_SM_GATHER=SimpleNamespace(get=lambda: True),
                SGLANG_MOONCAKE_CUSTOM_MEM_POOL=SimpleNamespace(get=lambda: None),
            ),
        }  # fmt: skip
        exec(compile(ast.Module([function], []), "engine.py", "exec"), names)
        with pytest.raises(Enough):
            names["_set_envs_and_config"](SimpleNamespace(**{**defaults, **fields}))
        return {name: given[name] for name in NCCL}

    return run


@pytest.mark.parametrize(
    "inherited", [{}, {"NCCL_CUMEM_ENABLE": "1"}, {"NCCL_NVLS_ENABLE": "1"}, dict.fromkeys(NCCL, "0")]
)
@pytest.mark.parametrize("sglang", [{}, {"enable_symm_mem": True}, {"enable_nccl_nvls": True}])
def test_the_trainer_has_the_settings_of_nccl_that_sglang_gives_itself(set_by_sglang, inherited, sglang):
    ours = nccl_variables(recipe_of(**sglang), inherited)
    assert ours == set_by_sglang(inherited, **sglang)
    # And SGLang keeps those that it is given.
    assert ours == set_by_sglang({**inherited, **ours}, **sglang)
    for variables in (trainer_variables, engine_variables):
        assert variables(recipe_of(**sglang), inherited) == thread_variables(1) | ours


def test_ends_of_a_group_have_as_many_channels_where_sglang_fixes_their_number():
    def channels(recipe, inherited=()):
        ends = [variables(recipe, dict(inherited)) for variables in (trainer_variables, engine_variables)]
        assert all(end.get(name) == ends[0].get(CHANNELS[0]) for end in ends for name in CHANNELS)
        return ends[0].get(CHANNELS[0])

    recipe = recipe_of()
    recipe.deterministic = True
    assert channels(recipe) is None
    recipe.rollout.engine_tp = 2
    assert channels(recipe) == "8"
    assert engine_variables(recipe, {})["SGLANG_DETERMINISTIC_NCCL_NCHANNELS"] == "8"
    assert channels(recipe, {"SGLANG_DETERMINISTIC_NCCL_NCHANNELS": "4"}) == "4"
    recipe.rollout.env = {"SGLANG_DETERMINISTIC_NCCL_NCHANNELS": "2"}
    assert channels(recipe) == "2"
    recipe.deterministic, recipe.rollout.env = False, {}
    assert channels(recipe) is None
    assert channels(recipe, dict.fromkeys(CHANNELS, "16")) == "16"
    recipe.rollout.sglang = {"enable_deterministic_inference": True}
    assert channels(recipe) == "8"
    recipe.resync.transport = TransportName.ipc
    assert channels(recipe) is None


def test_sglang_sets_no_other_variable_that_members_of_a_group_need_alike():
    found = {
        name
        for file in [*(SGLANG / "entrypoints").rglob("*.py"), *(SGLANG / "arg_groups").rglob("*.py")]
        for name in re.findall(r"""environ(?:\.setdefault\(|\[)["'](NCCL_\w+)""", file.read_text())
    }
    # The algorithm is that of all-reduce, graphs are an engine's own, MNNVL is for engines over nodes of one NVLink.
    others = {"NCCL_ALGO", "NCCL_GRAPH_MIXING_SUPPORT", "NCCL_GRAPH_REGISTER", "NCCL_MNNVL_ENABLE"}
    assert found == {*NCCL, *CHANNELS, *others}


@pytest.mark.parametrize("transport", [TransportName.ipc, TransportName.disk, TransportName.delta])
def test_other_transports_leave_nccl_as_it_is(transport):
    assert nccl_variables(recipe_of(transport, enable_symm_mem=True), {}) == {}


def test_fp8_training_rounds_with_scales_that_are_no_powers_of_two_as_the_engines_do():
    recipe = recipe_of(TransportName.ipc)
    recipe.trainer.fp8 = Fp8Scaling.blockwise
    assert trainer_variables(recipe, {})[FP8_SCALES] == "1"
    assert trainer_variables(recipe, {FP8_SCALES: "0"})[FP8_SCALES] == "0"
    assert FP8_SCALES not in engine_variables(recipe, {})
