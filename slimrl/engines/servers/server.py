"""One SGLang engine: its command line from the recipe, its process, its readiness.

Usable from any process, a Ray actor included: the engine ends with the process that started it.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import httpx

from slimrl import device
from slimrl.base.meeting_folder import meeting_folder
from slimrl.base.spans import PROFILE_FOLDER, child_variables
from slimrl.checkpoints.hf_checkpoint import is_block_fp8, is_packed_int4
from slimrl.config.env_vars import ENGINE_PINNED
from slimrl.config.hf_config import stacks_experts
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.config.sglang_kernels import plain_kernels
from slimrl.config.wrapper import wrapper_of
from slimrl.engines.engine_key import EngineKey
from slimrl.engines.servers.ports import free_port
from slimrl.engines.servers.process import ServerError, ServerProcess
from slimrl.engines.servers.speculation import speculative_arguments
from slimrl.models.family import has_linear_attention
from slimrl.models.hf_config import read_hf_config

_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(256 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(1024**3),
    "MALLOC_TOP_PAD_": str(64 * 1024**2),
}
"""Settings of glibc's malloc. By default it returns the activations of each step to the kernel and faults them in again
in the next: some 18,000 page faults in a prefill of 9,600 tokens, against a few hundred with these settings."""

CPU_MEMORY_FRACTION = 0.5
"""Fraction of the memory that an engine's weights and cache may take without a GPU"""

MIN_CACHE_TOKENS = 16384
"""Tokens of the KV cache of an engine without a GPU, at least: room for prefixes and for an evaluation."""

_STATES_PER_TRAJECTORY = 4
"""Number of states of gated delta nets for each trajectory on a CPU. SGLang takes 3 for a running request; the other
one waits for a later turn."""


_MEETING = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""Environment variable with the address at which the ranks of an engine find each other."""
_COUNTS = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which the processes of an engine share their metrics."""

ENGINE, TEACHER, PAST = "engine", "teacher", "past"
"""Roles of an engine: one of a rollout; one of the teacher, or of older versions of the policy, which no resync
reaches."""


@dataclass(frozen=True, kw_only=True)
class EnginePart:
    """The processes of an engine on one of its nodes. The first part alone serves requests."""

    number: int
    """Number of the part, from 0 in the order of ranks"""
    meeting: str
    """Address, `address:port` on the first part's node, at which the parts find each other"""


FLAGS = {
    "fp8_gemm_runner_backend": "--fp8-gemm-backend",
    "ep_join_mode": "--elastic-ep-join-mode",
    "ep_join_rank_offset": "--elastic-ep-join-rank-offset",
}
"""Fields of ServerArgs that a recipe may set and whose flags SGLang names otherwise than the field."""

SWITCHES = ("enable_tf32_matmul", "enable_fused_qk_norm_rope", "dcp_replicate_q_proj")
"""Fields that a recipe may set and that SGLang chooses itself where they are left out: false has the flag `--no-...`"""


def engine_arguments(
    rollout: RolloutConfig,
    model: Path | str,
    *,
    host: str,
    port: int,
    precision: Precision,
    cuda: bool,
    seed: int,
    dequantize: bool = False,
    plain: bool = False,
    linear_attention: bool = False,
    windows: bool = False,
    wrapped: bool = False,
    deterministic: bool = False,
    trust_remote_code: bool = False,
    part: EnginePart | None = None,
    trajectories: int | None = None,
    metrics: bool = False,
) -> list[str]:
    """SGLang's command line. `rollout.sglang` comes last and overrides the other values.

    Values become flags by the rules of SGLang's parser: True a bare flag, False or None nothing (False of a switch
    `--no-...`), a list several values, a mapping JSON.

    Args:
        dequantize: serve a quantised checkpoint as a plain model.
        plain: have kernels that leave weights as they are loaded, where SGLang would choose others.
        linear_attention: the model has gated delta nets.
        windows: it has layers with sliding windows.
        wrapped: serve a wrapped model as text.
        part: of an engine on several nodes.
        deterministic: results of a request depend on its seed alone, whatever shares its batch. On a CPU each request
            is sampled so in any case (slimrl/engines/plugin/cpu).
        trust_remote_code: run the code that the model brings along.
        trajectories: see cpu_cache_tokens.
        metrics: have SGLang's own metrics at /metrics.

    Raises:
        ValueError: with `plain`, `rollout.sglang` asks for others.
    """
    values: dict[str, Any] = {
        "model_path": str(model),
        "host": host,
        "port": port,
        "dtype": precision.dtype,
        "tp_size": rollout.engine_tp,
        "ep_size": rollout.engine_ep,
        "attn_dp_size": rollout.engine_attention_dp,
        "random_seed": seed,
        "skip_server_warmup": True,
        # Versions are numbers from the first token on.
        "weight_version": "0",
        "trust_remote_code": trust_remote_code,
        "enable_return_routed_experts": rollout.routed_experts,
        # A shared expert fused with the routed ones would be reported among a token's routed experts.
        "disable_shared_experts_fusion": True,
        # Without this an idle engine burns a core.
        "sleep_on_idle": True,
        "log_level": "warning",
        "enable_metrics": metrics,
    }
    overrides: dict[str, Any] = {}
    if dequantize:
        # read_weights.py loads the weights.
        overrides["quantization_config"] = None
    if wrapped:
        # Without a vision tower and with positions of text alone. SGLang's flag for it does not know these models; they
        # read the config.
        overrides["language_model_only"] = True
    if overrides:
        values["json_model_override_args"] = json.dumps(overrides)
    values |= speculative_arguments(rollout, model)
    if part is not None:
        values |= {"nnodes": rollout.engine_nodes, "node_rank": part.number, "dist_init_addr": part.meeting}
    if plain:
        values |= plain_kernels(rollout.sglang)
    if cuda:
        values["enable_memory_saver"] = rollout.colocated
        # SGLang's default graphs of prefills refuse the memory saver (runner_backend/breakable_cuda_graph_backend.py).
        # Those that know it, `full`, it calls experimental, and has them for its FlashAttention backend only.
        values["disable_prefill_cuda_graph"] = rollout.colocated
        values["enable_deterministic_inference"] = deterministic
    else:
        values |= _cpu_arguments(rollout, trajectories, linear_attention=linear_attention, windows=windows)
    return [word for name, value in {**values, **rollout.sglang}.items() for word in _flag(name, value)]


def cpu_cache_tokens(rollout: RolloutConfig, trajectories: int | None) -> int:
    """Tokens of the KV cache of each group of an engine's ranks without a GPU, all of which is taken at its start.

    It holds the engine's trajectories at their longest, and at least MIN_CACHE_TOKENS. More of them, such as an
    evaluation's, wait for each other in the engine.

    Args:
        trajectories: the most of a step that run at a time; None for no limit but the recipe's concurrency.
    """
    most = min(rollout.max_concurrency_per_engine, trajectories or rollout.max_concurrency_per_engine)
    return max(MIN_CACHE_TOKENS, ceil(most / rollout.engine_attention_dp) * rollout.max_trajectory_tokens)


def _cpu_arguments(
    rollout: RolloutConfig, trajectories: int | None, *, linear_attention: bool, windows: bool
) -> dict[str, Any]:
    requests = ceil(rollout.max_concurrency_per_engine / rollout.engine_attention_dp)
    values: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        # Room for what other processes take while the engine loads, which SGLang counts as the engine's. The size of
        # the KV cache is max_total_tokens.
        "mem_fraction_static": CPU_MEMORY_FRACTION,
        "max_total_tokens": cpu_cache_tokens(rollout, trajectories),
    }
    if windows:
        # The backend of a CPU finds no keys in a pool of their own.
        values["disable_hybrid_swa_memory"] = True
    if linear_attention:
        values |= {
            # The other way to cache states needs a GPU.
            "mamba_radix_cache_strategy": "no_buffer",
            "disable_overlap_schedule": True,
            # SGLang shares them out among the groups, and a group with fewer than a request takes starts no engine.
            "max_mamba_cache_size": _STATES_PER_TRAJECTORY * requests * rollout.engine_attention_dp,
        }
    return values


def _flag(name: str, value: Any) -> list[str]:
    """Words of the command line for one field."""
    if value is None or (value is False and name not in SWITCHES):
        return []
    flag = FLAGS.get(name, "--" + name.replace("_", "-"))
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    items = value if isinstance(value, list | tuple) else [value]
    return [flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in items)]


def engine_environment(rollout: RolloutConfig, *, precision: Precision, cuda: bool) -> dict[str, str]:
    """Variables of the engine's process: the recipe's, and those that it may not set (config/env_vars.py)."""
    common = {
        **rollout.env,
        "OMP_NUM_THREADS": str(rollout.threads_per_engine),
        # By default /health generates a token, and so hangs while the engine is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        **{name: value for name, (value, _) in ENGINE_PINNED.items()},
        # The last inputs of a gated delta net's convolution, which SGLang would round to bfloat16 in any model.
        "SGLANG_MAMBA_CONV_DTYPE": precision.dtype,
        # SGLang fuses two tensors of an indexer of sparse attention: neither could be verified by its name, and one in
        # FP8 would be lost if a bucket ended between its weight and its scales.
        "SGLANG_DISABLE_DSA_INDEXER_FUSION": "1",
    }
    if cuda:
        # Without it an engine that has released its memory keeps that of its CUDA graphs.
        return {**common, "SGLANG_MEMORY_SAVER_CUDA_GRAPH": str(rollout.colocated).lower()}
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", **_KEEP_FREED_MEMORY}
    if rollout.engine_tp > 1:
        per_rank = rollout.threads_per_engine
        # SGLang counts the ranks of a node from 0.
        ranks = rollout.engine_tp // rollout.engine_nodes
        bounds = [(rank * per_rank, (rank + 1) * per_rank - 1) for rank in range(ranks)]
        # Ranks of one machine have the same memory; other processes change it between two looks.
        cpu["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
        cpu["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(a) if a == b else f"{a}-{b}" for a, b in bounds)
    return {**common, **cpu}


def part_name(index: int, part: int, role: str = ENGINE) -> str:
    """Name of an engine, or of its processes on a further node, in errors and logs."""
    return f"{role} {index} part {part}" if part else f"{role} {index}"


def start_engine(
    name: str, key: EngineKey, arguments: Sequence[str], variables: Mapping[str, str], log: Path
) -> ServerProcess:
    """The process of an engine with this key, SGLang's arguments and these variables of the environment."""
    with key.handed_over() as descriptor:
        main = [sys.executable, "-m", "slimrl.engines.plugin.launch", str(os.getpid()), str(descriptor)]
        return ServerProcess(name, [*main, *arguments], variables, log, pass_fds=[descriptor])


class EngineServer:
    """A running engine. The constructor starts the process; `wait_ready` waits for it."""

    def __init__(
        self,
        index: int,
        rollout: RolloutConfig,
        model: Path | str,
        log: Path,
        *,
        key: EngineKey,
        precision: Precision,
        cuda: bool = False,
        host: str = "127.0.0.1",
        port: int | None = None,
        seed: int = 0,
        deterministic: bool = False,
        trust_remote_code: bool = False,
        part: EnginePart | None = None,
        role: str = ENGINE,
        trajectories: int | None = None,
        metrics: bool = False,
    ) -> None:
        """Start engine `index`.

        Args:
            index: the engine's number in the run, for errors.
            model: Hugging Face checkpoint folder.
            log: file for its output.
            key: with which it obeys.
            precision: of the weights and of all computation.
            cuda: run on a GPU.
            host: address to listen on.
            port: None for a free one.
            seed: for requests without a seed.
            deterministic, trust_remote_code, part, trajectories, metrics: see engine_arguments.
            role: for errors; the kernels of a teacher may store its weights as they like.
        """
        self.index, self._part, self._name = index, part, part_name(index, 0, role)
        self._timeout_s, self._key = rollout.startup_timeout_s, key
        self.port = port or free_port(host)
        self.url = f"http://{host}:{self.port}"
        hf_config = read_hf_config(Path(model))
        arguments = engine_arguments(
            rollout,
            model,
            host=host,
            port=self.port,
            precision=precision,
            cuda=cuda,
            seed=seed,
            dequantize=(is_block_fp8(Path(model)) and not device.computes_block_fp8())
            or (is_packed_int4(Path(model)) and not cuda),
            plain=role != TEACHER and (device.packs_engine_weights() or (cuda and stacks_experts(hf_config))),
            linear_attention=has_linear_attention(hf_config),
            windows=bool(hf_config.get("sliding_window")) and stacks_experts(hf_config),
            wrapped=wrapper_of(hf_config) is not None,
            deterministic=deterministic,
            trust_remote_code=trust_remote_code,
            part=part,
            trajectories=trajectories,
            metrics=metrics,
        )
        name, profile = part_name(index, 0 if part is None else part.number, role), log.parent.parent / PROFILE_FOLDER
        variables = {**engine_environment(rollout, precision=precision, cuda=cuda), **child_variables(profile, name)}
        self._folders = ExitStack()
        if part is None:
            # In place of torch's store behind a port, which obeys whoever reaches it.
            variables[_MEETING] = f"file://{self._folders.enter_context(meeting_folder('engine'))}/ranks"
        if metrics:
            # Its processes share their counts in files, which SGLang would leave behind when it is killed.
            variables[_COUNTS] = self._folders.enter_context(meeting_folder("metrics"))
        self.process = start_engine(name, key, arguments, variables, log)

    def wait_ready(self) -> None:
        """Raises ServerError with the cause from the log if the engine does not come up in time."""
        self.process.wait_ready(f"{self.url}/health_generate", self._timeout_s, self._key.headers)
        if self._part is not None and self._part.number > 0:
            return
        try:
            # As after SGLang's own warm-up: garbage collections skip the objects of the start-up from now on. Flushing
            # the cache of a CPU engine collects garbage, which would take 0.3 s otherwise.
            answer = httpx.post(
                f"{self.url}/freeze_gc", headers=self._key.headers, timeout=self._timeout_s, trust_env=False
            )
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"{self._name}: freeze_gc: {error!r}") from error

    def check(self) -> None:
        """Raises ServerError with the cause from the log if the engine has ended."""
        self.process.check()

    def stop(self) -> None:
        """Kill the engine and its children, which have nothing to save. Idempotent."""
        # On SIGTERM SGLang waits 5 s for core dumps of its children.
        self.process.stop(first=signal.SIGKILL)
        self._folders.close()
