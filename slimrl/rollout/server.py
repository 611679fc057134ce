"""One SGLang engine: its command line from the recipe, its process, its readiness.

Usable from any process, a Ray actor included: the engine ends when the process that made it does.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx

from slimrl import device
from slimrl.config.schema import Precision, RolloutConfig
from slimrl.models.hf_checkpoint import is_block_fp8
from slimrl.rollout.ports import free_port
from slimrl.rollout.process import ServerError, ServerProcess

_KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(256 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(1024**3),
    "MALLOC_TOP_PAD_": str(64 * 1024**2),
}
"""Settings of the C library's allocator. By default it gives the activations of each step back to the kernel and
faults them in again at the next: some 18,000 page faults in a prefill of 9,600 tokens, a few hundred with these."""

_DTYPE = {Precision.fp32: "float32", Precision.bf16: "bfloat16"}


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
) -> list[str]:
    """SGLang's command line; `rollout.sglang` is applied last and wins, for those fields that a recipe may set.

    With `dequantize` a checkpoint in block FP8 is served as the plain model that it dequantises to.

    A value of `rollout.sglang` becomes a flag by the rules of SGLang's parser: True a bare flag, False or None
    nothing, a list several values.
    """
    values: dict[str, Any] = {
        "model_path": str(model),
        "host": host,
        "port": port,
        "dtype": _DTYPE[precision],
        "tp_size": rollout.engine_tensor,
        "ep_size": rollout.engine_expert,
        "random_seed": seed,
        "skip_server_warmup": True,
        # Tokens go in and come out, and versions are numbers from the first token on.
        "weight_version": "0",
        "enable_return_routed_experts": rollout.routed_experts,
        # Fused with the routed experts, a shared one would be reported among a token's choices.
        "disable_shared_experts_fusion": True,
        # Without this an idle engine burns a core.
        "sleep_on_idle": True,
        "log_level": "warning",
    }
    if dequantize:
        # dequantized_loading.py gives it the weights.
        values["json_model_override_args"] = '{"quantization_config": null}'
    if cuda:
        values["enable_memory_saver"] = rollout.colocated
    else:
        values |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "mem_fraction_static": 0.1,
            "max_total_tokens": max(16384, rollout.max_concurrency_per_engine * rollout.max_trajectory_tokens),
        }
    flags: list[str] = []
    for name, value in {**values, **rollout.sglang}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags


def engine_environment(rollout: RolloutConfig, *, cuda: bool) -> dict[str, str]:
    """Variables of the engine's process."""
    common = {
        "OMP_NUM_THREADS": str(rollout.threads_per_engine),
        # /health, by which the router judges, would generate a token, for which a paused engine lets it wait.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    if cuda:
        return common
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", **_KEEP_FREED_MEMORY}
    if rollout.engine_tensor > 1:
        per_rank = rollout.threads_per_engine
        bounds = [(rank * per_rank, (rank + 1) * per_rank - 1) for rank in range(rollout.engine_tensor)]
        cpu["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(a) if a == b else f"{a}-{b}" for a, b in bounds)
    return {**common, **cpu}


class EngineServer:
    """A running engine. Making one starts the process; `wait_ready` waits for it."""

    def __init__(
        self,
        index: int,
        rollout: RolloutConfig,
        model: Path | str,
        log: Path,
        *,
        precision: Precision,
        cuda: bool = False,
        host: str = "127.0.0.1",
        port: int | None = None,
        seed: int = 0,
    ) -> None:
        """Start engine `index`.

        Args:
            index: number of the engine among those of the run; names it in errors.
            rollout: its settings.
            model: Hugging Face checkpoint folder.
            log: file for its output.
            precision: of the weights and of all computation.
            cuda: whether it runs on a GPU.
            host: address to listen on.
            port: None for a free one.
            seed: of what a request does not seed.
        """
        self.index = index
        self._timeout_s = rollout.startup_timeout_s
        self.port = port or free_port(host)
        self.url = f"http://{host}:{self.port}"
        arguments = engine_arguments(
            rollout,
            model,
            host=host,
            port=self.port,
            precision=precision,
            cuda=cuda,
            seed=seed,
            dequantize=is_block_fp8(Path(model)) and not device.computes_block_fp8(),
        )
        self.process = ServerProcess(
            f"engine {index}",
            [sys.executable, "-m", "slimrl.rollout.launch", str(os.getpid()), *arguments],
            engine_environment(rollout, cuda=cuda),
            log,
        )

    def wait_ready(self) -> None:
        """Raises ServerError with the cause from the log if the engine does not come up in time."""
        self.process.wait_ready(f"{self.url}/health_generate", self._timeout_s)
        try:
            # As SGLang does after a warm-up of its own: what start-up made is left out of garbage collections from now
            # on. Flushing the cache of a CPU engine collects, and would take a third of a second.
            httpx.post(f"{self.url}/freeze_gc", timeout=self._timeout_s, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"engine {self.index}: freeze_gc: {error!r}") from error

    def check(self) -> None:
        """Raises ServerError with the cause from the log if the engine has ended."""
        self.process.check()

    def stop(self) -> None:
        """End the engine and its children at once, for they have nothing to save; idempotent."""
        # SGLang answers SIGTERM by waiting five seconds for a core dump of its own children.
        self.process.stop(first=signal.SIGKILL)
