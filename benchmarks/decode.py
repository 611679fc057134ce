"""SGLang's CPU engine with slimrl's plugin against the same engine as shipped, in one run on the toy model.

With `--against` the other engine has the plugin of another checkout of slimrl. Both have one thread and answer in turn;
greedy tokens and their log-probs are compared.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from figures import write_figures

from slimrl.engines.plugin import cpu

if __name__ in ("__main__", "__mp_main__"):
    # The shipped engine spawns processes that import this file and need the stand-ins too.
    cpu.install()

SERVE_SHIPPED = "--serve-shipped"
PROMPT_TOKENS = 14
NEW_TOKENS = 128
PREFILL = (64, 150)
"""Prompts and tokens of each in the prefill measurement."""
BATCHES = [1, 8, 32, 128]
SHARED_MEMORY = Path("/dev/shm")


def serve_shipped(arguments: list[str]) -> None:
    """Run an SGLang server without the plugin."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    from slimrl.base.lifeline import end_with

    end_with(int(arguments[0]))
    run_server(prepare_server_args(arguments[1:]))


class Engine:
    """One of the two engines."""

    def __init__(self, name: str, model: Path, folder: Path, max_concurrency: int, checkout: Path | None) -> None:
        """checkout: of slimrl, whose plugin the engine `against` has."""
        from slimrl.config.schema.precision import Precision
        from slimrl.config.schema.rollout import RolloutConfig
        from slimrl.engines.engine_key import new_key
        from slimrl.engines.servers.ports import free_port
        from slimrl.engines.servers.process import ServerProcess
        from slimrl.engines.servers.server import engine_arguments, engine_environment, start_engine

        rollout = RolloutConfig(max_trajectory_tokens=256, max_concurrency_per_engine=max_concurrency)
        port = free_port()
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        arguments = engine_arguments(
            rollout, model, host="127.0.0.1", port=port, precision=Precision.fp32, cuda=False, seed=0
        )
        env, log = engine_environment(rollout, precision=Precision.fp32, cuda=False), folder / f"{name}.log"
        self._key = new_key()
        if name == "against":
            # Python looks into the present folder first, unless told otherwise.
            env |= {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        if name != "shipped":
            self.process = start_engine(name, self._key, arguments, env, log)
            return
        # The list of plugins to load; no plugin has this name.
        env["SGLANG_PLUGINS"] = "none"
        main = [sys.executable, __file__, SERVE_SHIPPED, str(os.getpid())]
        self.process = ServerProcess(name, [*main, *arguments], env, log)

    def wait_ready(self) -> None:
        import psutil

        self.process.wait_ready(f"{self.url}/health", 300)
        children = psutil.Process(self.process.pid).children(recursive=True)
        self._scheduler = max(children, key=lambda child: sum(child.cpu_times()[:2]))

    def generate(self, prompts: list[list[int]], new_tokens: int, temperature: float = 1.0) -> list[dict]:
        import httpx

        sampling = {"max_new_tokens": new_tokens, "temperature": temperature, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        with httpx.Client(base_url=self.url, headers=self._key.headers, timeout=300, trust_env=False) as http:
            http.post("/flush_cache").raise_for_status()
            return http.post("/generate", json=body).raise_for_status().json()

    def measure(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        """(wall-clock seconds, CPU seconds of the scheduler)"""
        wall, cpu = time.perf_counter(), sum(self._scheduler.cpu_times()[:2])
        self.generate(prompts, new_tokens)
        return time.perf_counter() - wall, sum(self._scheduler.cpu_times()[:2]) - cpu

    def stop(self) -> None:
        """End the engine and remove its shared-memory files, which the shipped engine leaves behind."""
        shared = self._shared_files()
        # As EngineServer does: on SIGTERM SGLang would first wait for its children.
        self.process.stop(first=signal.SIGKILL)
        for path in shared:
            path.unlink(missing_ok=True)

    def _shared_files(self) -> list[Path]:
        """Files by inode: a semaphore is mapped under its earlier name."""
        import psutil

        inodes = set()
        try:
            main = psutil.Process(self.process.pid)
            for process in (main, *main.children(recursive=True)):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if str(SHARED_MEMORY) in line:
                        inodes.add(int(line.split()[4]))
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
            return []
        return [Path(entry.path) for entry in os.scandir(SHARED_MEMORY) if entry.inode() in inodes]


def prompts_of(count: int, length: int) -> list[list[int]]:
    return [[3 + (7 * row + 13 * column) % 300 for column in range(length)] for row in range(count)]


def compare(engines: list[Engine]) -> dict[str, float]:
    """Greedy tokens that differ, and the largest difference of the log-probs where contexts are equal."""
    prompts = [prompt[: 3 + 5 * row] for row, prompt in enumerate(prompts_of(32, 200))]
    first, second = (engine.generate(prompts, 32, temperature=0.0) for engine in engines)
    different, largest = 0, 0.0
    for a, b in zip(first, second, strict=True):
        pairs = zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True)
        for (logprob_a, token_a, _), (logprob_b, token_b, _) in pairs:
            if token_a != token_b:
                different += 1
                break
            largest = max(largest, abs(logprob_a - logprob_b))
    return {"sequences_with_other_tokens": different, "logprob_abs_max": largest}


def run(engines: list[Engine], repeats: int, batches: list[int]) -> dict:
    cases = {f"decode_{batch}": (prompts_of(batch, PROMPT_TOKENS), NEW_TOKENS, batch * NEW_TOKENS) for batch in batches}
    cases["prefill"] = (prompts_of(*PREFILL), 1, PREFILL[0] * PREFILL[1])
    result: dict = {}
    for case, (prompts, new_tokens, tokens) in cases.items():
        samples: dict[str, list[tuple[float, float]]] = {engine.name: [] for engine in engines}
        for repeat in range(repeats + 1):
            for engine in engines:
                sample = engine.measure(prompts, new_tokens)
                # The first is a warm-up.
                samples[engine.name] += [sample] if repeat else []
        wall = {name: statistics.median(sample[0] for sample in values) for name, values in samples.items()}
        cpu = {name: statistics.median(sample[1] for sample in values) for name, values in samples.items()}
        result[case] = {
            "tokens_per_s": {name: tokens / seconds for name, seconds in wall.items()},
            "cpu_us_per_token": {name: 1e6 * seconds / tokens for name, seconds in cpu.items()},
            "ratio": wall[engines[0].name] / wall[engines[1].name],
            "cpu_ratio": cpu[engines[0].name] / cpu[engines[1].name],
        }
        speeds = ", ".join(f"{name} {speed:.0f} tok/s" for name, speed in result[case]["tokens_per_s"].items())
        ratios = f"ratio {result[case]['ratio']:.2f}, of processor time {result[case]['cpu_ratio']:.2f}"
        print(f"{case:12s} {speeds}; {ratios}", flush=True)
    return result


def main() -> int:
    import httpx
    from slimrl_tools.toy.toy import ToySize, write_toy

    from slimrl.engines.servers.process import ServerError

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences at a time, of each case")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the toy")
    parser.add_argument("--against", type=Path, help="a checkout of slimrl, in place of the engine as shipped")
    options = parser.parse_args()
    if options.repeats < 1 or min(options.batches) < 1:
        print("--repeats and --batches: at least 1.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model is None:
            write_toy("qwen3_moe", folder / "toy", ToySize(init_std=0.1), seed=0)
        model, most = options.model or folder / "toy", max(options.batches)
        against = None if options.against is None else options.against.resolve()
        kinds = ("shipped" if against is None else "against", "slimrl")
        engines = [Engine(kind, model, folder, most, against) for kind in kinds]
        try:
            for engine in engines:
                engine.wait_ready()
            figures = {"cases": run(engines, options.repeats, options.batches), "agreement": compare(engines)}
        except (ServerError, httpx.HTTPError) as error:
            print(f"failed: {error!r}", file=sys.stderr)
            return 1
        finally:
            for engine in engines:
                engine.stop()
    print(f"agreement of greedy decoding: {figures['agreement']}")
    write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE_SHIPPED]:
        serve_shipped(sys.argv[2:])
    else:
        sys.exit(main())
