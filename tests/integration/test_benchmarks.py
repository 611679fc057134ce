"""Every file of benchmarks/ runs to its end at its smallest size and writes the figures of docs/internals.md."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from broken_package import METADATA, write_tasks
from isolation import what_is_missing
from sandboxes import needs_namespaces
from slimrl_tools.toy.search_data import write_search_data
from slimrl_tools.toy.toy import ToySize, write_toy
from slow_talk import end_turns
from venvs import environment_python

from slimrl.observability.metrics import read_metrics
from slimrl.resync.ipc.shared_buffer import SHARED_MEMORY_DIR

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TRL = BENCHMARKS.parent / "runs" / "bench" / "trl"
LEFT_BY_SGLANG = ("sglang_loads_", "sem.mp-")


def figures_of(
    name: str, out: Path, *arguments: str, timeout_s: float = 280, codes: Sequence[int] = (0,)
) -> dict[str, Any]:
    """What `python benchmarks/NAME.py ARGUMENTS --json OUT` wrote; `codes` are exit codes that it may have."""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode in codes, f"{done.stdout}\n{done.stderr}"
    return json.loads(out.read_text())


def assert_positive(*values: float) -> None:
    assert all(math.isfinite(value) and value > 0 for value in values), values


def left_by_sglang() -> set[str]:
    """Files that SGLang and multiprocessing make and no living process maps; by inode, since names change."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped |= {int(line.split()[4]) for line in maps.read_text().splitlines() if str(SHARED_MEMORY_DIR) in line}
        except OSError:  # The process has ended meanwhile, or is another user's.
            continue
    entries = [entry for entry in os.scandir(SHARED_MEMORY_DIR) if entry.name.startswith(LEFT_BY_SGLANG)]
    return {entry.name for entry in entries if entry.inode() not in mapped}


@pytest.mark.full
def test_a_step_of_fixed_work_is_timed(tmp_path: Path):
    figures = figures_of(
        "step", tmp_path / "step.json", "--repeats", "1",
        "trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.num_engines=1",
    )  # fmt: skip
    (step,) = figures["steps"]
    assert step["rollout/tokens"] == 16 * 8 * 48
    assert figures["total_s"]["median"] == step["time/step_s"]
    phases = [figures[f"{phase}_s"]["median"] for phase in ("rollout", "logprobs", "training", "resync")]
    assert_positive(*phases)
    assert sum(phases) < figures["total_s"]["median"]


@pytest.mark.full
def test_the_agent_loop_is_timed_beside_bare_batches(tmp_path: Path):
    figures = figures_of("agent_loop", tmp_path / "loop.json", "--repeats", "1", "rollout.num_engines=1")
    (seconds,) = figures["rounds"]
    assert figures["ratio"] == pytest.approx(seconds["bare"] / seconds["agent loop"])
    assert_positive(*seconds.values(), *figures["tokens_per_s"].values())


@pytest.mark.full
def test_algorithms_are_compared_and_results_are_not_measured_again(tmp_path: Path):
    out, plot = tmp_path / "algorithms.json", tmp_path / "curves.png"
    arguments = [
        "--folder", str(tmp_path / "bench"), "--case", "gspo", "--case", "ppo", "--seeds", "1", "--steps", "1",
        "--sft-updates", "1", "--problems", "8", "--plot", str(plot),
        "rollout.sampling.max_new_tokens=8", "rollout.eval_sampling.max_new_tokens=8", "rollout.num_engines=1",
        "critic.warmup_steps=0",
    ]  # fmt: skip
    figures = figures_of("algorithms", out, *arguments)
    for name in ("gspo", "ppo"):
        curve = figures["results"][name]["0"]["curve"]
        assert [step for step, _ in curve] == [0, 1]
        assert figures["table"][name]["area"] == pytest.approx((curve[0][1] + curve[1][1]) / 2)
    assert plot.stat().st_size > 10_000
    written = out.stat().st_mtime_ns
    assert figures_of("algorithms", out, *arguments)["results"] == figures["results"]
    assert out.stat().st_mtime_ns == written


def test_noise_in_the_routers_is_accepted_by_the_command_of_the_comparison_alone(tmp_path: Path):
    write_toy("qwen3_moe", tmp_path / "model", ToySize(layers=2, hidden=64, moe_intermediate=64), seed=0)
    prompt = {"prompt": "1 + 1", "label": "2"}
    (tmp_path / "data.jsonl").write_text(json.dumps(prompt) + "\n")
    recipe = str(BENCHMARKS.parent / "recipes" / "tiny_moe" / "gspo_calculator.yaml")
    settings = [
        f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'data.jsonl'}",
        f"data.eval.heldout={tmp_path / 'data.jsonl'}", "trainer.megatron={moe_input_jitter_eps: 0.03}",
    ]  # fmt: skip
    said = []
    for command in (["-m", "slimrl.cli"], [str(BENCHMARKS / "noisy_slimrl.py")]):
        words = [sys.executable, *command, "config", "check", recipe, *settings]
        done = subprocess.run(words, capture_output=True, text=True, timeout=140, check=False)
        said.append("moe_input_jitter_eps: " in done.stdout + done.stderr)
    assert said == [True, False]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.full
def test_algorithms_are_compared_on_a_model_of_reasoning_gym(tmp_path: Path):
    pytest.importorskip("reasoning_gym")
    write_toy("qwen3_moe", tmp_path / "toy", ToySize(layers=2), seed=0)
    out, plot = tmp_path / "real.json", tmp_path / "curves.png"
    arguments = [
        "--folder", str(tmp_path / "bench"), "--model", str(tmp_path / "toy"), "--steps", "1", "--plot", str(plot),
        "rollout.prompts_per_step=4", "rollout.sampling.max_new_tokens=8", "rollout.eval_sampling.max_new_tokens=4",
        "rollout.num_engines=1", "algorithm.skip_zero_variance=false",
    ]  # fmt: skip
    results = figures_of("algorithms_real", out, *arguments)["results"]
    for name in ("gspo", "grpo"):
        curve = results[name]["0"]["curve"]
        assert [step for step, _ in curve] == [0, 1]
        assert all(0 <= accuracy < 0.2 for _, accuracy in curve)
    assert plot.stat().st_size > 10_000


TINY = (
    "steps=1", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.num_engines=1",
    "algorithm.skip_zero_variance=false",
)  # fmt: skip
SHORT = ("rollout.sampling.max_new_tokens=8", "rollout.eval_sampling.max_new_tokens=8")


@pytest.mark.full
@needs_namespaces
@pytest.mark.parametrize("task", ["python", "search"])
def test_a_task_with_tools_is_learned_from_nothing_and_what_is_there_is_not_made_again(tmp_path: Path, task: str):
    out, plot = tmp_path / "task.json", tmp_path / "curve.png"
    arguments = [
        task, "--folder", str(tmp_path / "task"), "--sft-updates", "21", "--problems", "8",
        "--conversations", "336", "--plot", str(plot), *TINY, *SHORT,
    ]  # fmt: skip
    curve = figures_of("agent_tasks", out, *arguments)["curve"]
    assert [step for step, _ in curve] == [0, 1]
    assert plot.stat().st_size > 10_000
    made = (tmp_path / "task/gspo/export/hf/config.json").stat().st_mtime_ns
    assert figures_of("agent_tasks", out, *arguments)["curve"] == curve
    assert (tmp_path / "task/gspo/export/hf/config.json").stat().st_mtime_ns == made


ALWAYS_RIGHT = """
class AlwaysRight:
    def __init__(self, answer_in):
        pass

    def __call__(self, trajectory, prompt):
        return 1.0
"""


@pytest.mark.full
@pytest.mark.parametrize(("name", "conversations"), [("synthesis", 208), ("proposer", 336)])
def test_a_task_of_synthesised_or_of_made_up_questions_is_learned(tmp_path: Path, name: str, conversations: int):
    folder = tmp_path / name
    sizes = ("--sft-updates", "21", "--problems", "6", "--conversations", str(conversations))
    figures = figures_of("agent_tasks", tmp_path / "task.json", name, "--folder", str(folder), *sizes, *TINY, *SHORT)
    assert figures["task"] == name
    assert [step for step, _ in figures["curve"]] == [0, 1]
    assert all(-1 <= accuracy <= 1 for _, accuracy in figures["curve"])
    assert len((folder / "data" / "sft.jsonl").read_text().splitlines()) == conversations
    assert len((folder / "data" / "heldout.jsonl").read_text().splitlines()) == 6


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "environment"), [("kuhn_poker", "open_spiel"), ("tic_tac_toe", "open_spiel"), ("textarena", "textarena")]
)
def test_a_game_is_learned_against_itself(tmp_path: Path, name: str, environment: str):
    environment_python(environment)
    folder = tmp_path / name
    sizes = ("--sft-updates", "21", "--problems", "6", "rollout.max_turns=2")
    figures = figures_of("agent_tasks", tmp_path / "task.json", name, "--folder", str(folder), *sizes, *TINY)
    assert [step for step, _ in figures["curve"]] == [0, 1]
    # Who is paid what is a game's own; nobody wins more than the two chips that are at stake in Kuhn poker.
    assert all(-2 <= paid <= 2 for _, paid in figures["curve"])
    (step,) = (one for one in read_metrics(folder / "gspo" / "metrics.jsonl") if one["step"] == 1)
    assert {f"reward/role/player_{seat}" for seat in (0, 1)} & step.keys()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_searches_are_compared_and_their_paths_are_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "task"
    write_search_data(folder / "data", seed=0, num_train=8, num_heldout=4, num_conversations=8)
    text = folder / "data" / "sft.jsonl"
    write_toy("qwen3_moe", folder / "sft" / "export" / "hf", ToySize(layers=2, max_position=1024), seed=0, text=text)
    # Conversations are those of trajectories that are complete.
    end_turns(folder / "sft" / "export" / "hf")
    (tmp_path / "rewards_of_test.py").write_text(ALWAYS_RIGHT)
    monkeypatch.chdir(tmp_path)
    sizes = ("--folder", str(folder), "--problems", "4", "--questions", "16", "--updates", "21")
    methods = ("--methods", "sample", "mcts_4")
    settings = (
        f"agent.tool_args.corpus={folder / 'data' / 'corpus.jsonl'}",
        "reward.parts.exact_match.function=rewards_of_test:AlwaysRight",
    )
    words = ("search", *methods, *sizes, "rollout.max_turns=2", *settings)
    figures = figures_of("search_methods", tmp_path / "out.json", *words, timeout_s=880)
    for name in ("sample", "mcts_4", "after paths", "after samples"):
        assert figures[name]["low"] == figures[name]["accuracy"] == figures[name]["high"] == 1
    # A search samples its width of turns, three, where a sample takes one.
    assert figures["mcts_4"]["tokens"] > 1.5 * figures["sample"]["tokens"]
    assert 8 <= figures["after paths"]["conversations"] <= 16 < figures["after samples"]["conversations"]
    assert_positive(figures["after paths"]["sampled"], figures["after samples"]["sampled"])
    assert (folder / "search" / "search.png").stat().st_size > 10_000


@pytest.mark.full
def test_both_engines_decode_the_same_tokens_and_leave_no_shared_memory(tmp_path: Path):
    before = left_by_sglang()
    figures = figures_of("decode", tmp_path / "decode.json", "--repeats", "1", "--batches", "1")
    assert left_by_sglang() - before == set()
    assert figures["agreement"]["logprob_abs_max"] < 1e-4
    assert figures["cases"].keys() == {"decode_1", "prefill"}
    for case in figures["cases"].values():
        speeds = case["tokens_per_s"]
        assert case["ratio"] == pytest.approx(speeds["slimrl"] / speeds["shipped"])
        assert_positive(*speeds.values(), case["cpu_ratio"], *case["cpu_us_per_token"].values())


def test_block_fp8_is_timed_against_plain_torch(tmp_path: Path):
    figures = figures_of("quantize", tmp_path / "fp8.json", "--repeats", "1", "--matrix", "expert of Qwen3-30B-A3B")
    (case,) = figures["cases"].values()
    for way in ("quantize", "dequantize"):
        assert case[way]["ratio"] == pytest.approx(case[way]["gb_per_s"] / case[way]["plain_gb_per_s"])


def test_logprobs_in_chunks_are_measured_against_plain_torch(tmp_path: Path):
    sizes = ("--tokens", "96", "--vocab", "20011", "--chunk-tokens", "4", "--repeats", "1")
    figures = figures_of("logprobs", tmp_path / "logprobs.json", *sizes)
    chunked, plain, ratio = (figures["ways"][name] for name in ("chunked", "plain", "ratio"))
    for key, value in ratio.items():
        assert value == pytest.approx(chunked[key] / plain[key])
    assert_positive(plain["extra_bytes"], *(way[key] for way in (chunked, plain) for key in ("seconds", "cpu_seconds")))
    assert ratio["extra_bytes"] < figures["limits"]["memory"]


@needs_namespaces
def test_isolated_runs_are_timed_against_plain_processes(tmp_path: Path):
    figures = figures_of("sandbox", tmp_path / "sandbox.json", "--runs", "10", "--workers", "2")
    assert figures["ways"].keys() == {"warm", "bubblewrap", "process"}
    for way in figures["ways"].values():
        assert_positive(*way.values())
        assert way["median_ms"] <= way["p99_ms"]


@pytest.mark.full
def test_episodes_are_timed_beside_bare_coroutines(tmp_path: Path):
    sizes = ("--episodes", "20", "--turns", "3", "--repeats", "1", "--latency", "0.01")
    figures = figures_of("episodes", tmp_path / "episodes.json", *sizes)
    ours, bare = (figures["ways"][name] for name in ("episodes", "bare"))
    assert figures["ratio"] == pytest.approx(ours["cpu_ms_per_turn"] / bare["cpu_ms_per_turn"])
    assert figures["difference_ms"] == pytest.approx(ours["cpu_ms_per_turn"] - bare["cpu_ms_per_turn"])
    assert_positive(bare["cpu_ms_per_turn"], ours["seconds"], bare["seconds"])
    assert ours["cpu_ms_per_turn"] > bare["cpu_ms_per_turn"]


@pytest.mark.full
def test_each_token_passes_through_the_driver_once(tmp_path: Path):
    sizes = ("--trajectories", "64", "256", "--ranks", "16", "--repeats", "1")
    figures = figures_of("growth", tmp_path / "growth.json", *sizes)["sizes"]
    assert figures.keys() == {"64 x 16", "256 x 16"}
    few, many = figures.values()
    for size in (few, many):
        assert_positive(size["cpu_s"]["packing"], size["cpu_s"]["rollout"], size["wall_s"]["step"])
        assert size["cpu_s"]["step"] == pytest.approx(sum(size["cpu_s"].values()) - size["cpu_s"]["step"])
    sent, received = (many["bytes"][way] - few["bytes"][way] for way in ("sent", "received"))
    # Of each token its id, the next one, position, trajectory, version and the engine's log-prob, four bytes each, and
    # two masks, to four data-parallel ranks of four; back come the trainer's log-probs of the sampled ones. Groups
    # of zero variance are left out, and padding is added.
    assert sent / (many["tokens"] - few["tokens"]) == pytest.approx(26, rel=0.04)
    assert received / (many["sampled_tokens"] - few["sampled_tokens"]) == pytest.approx(4, rel=0.04)


@pytest.mark.full
def test_the_rollout_service_is_measured_with_all_slots_taken(tmp_path: Path):
    sizes = ("--episodes", "40", "80", "--updates", "3", "--turns", "2", "--latency", "0.05")
    figures = figures_of("rollout_service", tmp_path / "rollout_service.json", *sizes)
    for episodes in (40, 80):
        row = figures["episodes"][str(episodes)]
        assert row["most_in_flight"] == episodes
        assert row["turns"] >= 2 * 3 * max(8, episodes // 10)
        assert_positive(row["cpu_ms_per_turn"], row["peak_kb_per_episode"], row["save_s"], row["saved_mb"])


@pytest.mark.full
def test_the_gateway_is_timed_against_the_engines_own_endpoint(tmp_path: Path):
    sizes = ("--requests", "3", "--sessions", "20", "--turns", "2")
    figures = figures_of("gateway", tmp_path / "gateway.json", *sizes)
    assert figures["latency"].keys() == {"sglang chat", "sglang tokens", "gateway"}
    assert_positive(*(way["p50_ms"] for way in figures["latency"].values()))
    assert figures["latency"]["sglang chat"]["added_p99_ms"] == 0
    assert figures["sessions"]["most_requests_under_way"] == 20
    assert_positive(figures["sessions"]["cpu_ms_per_request"], figures["sessions"]["client_cpu_ms_per_request"])


@pytest.mark.full
def test_engines_are_chosen_by_prefix_and_load_and_by_hash(tmp_path: Path):
    sizes = ("--groups", "3", "--samples", "3", "--turns", "2", "--at-once", "2", "--repeats", "1")
    figures = figures_of("routing", tmp_path / "routing.json", *sizes)
    ours, by_hash = (figures["ways"][name] for name in ("by prefix and load", "by hash"))
    for way in (ours, by_hash):
        assert_positive(*way.values())
        assert way["hit_fraction"] < 1 <= way["balance"] <= 2
        assert way["p50_s"] <= way["p99_s"]
    assert ours["input_tokens"] == by_hash["input_tokens"]


@pytest.mark.full
def test_resyncs_are_timed_against_copies_and_as_deltas(tmp_path: Path):
    figures = figures_of("resync", tmp_path / "resync.json", "--repeats", "1", "--gigabytes", "0.03")
    (ipc,) = figures["ipc"].values()
    assert ipc["bytes"] == figures["p2p"]["bytes"] == pytest.approx(0.03e9, rel=0.5)
    assert ipc["verified_tensors"] == figures["p2p"]["verified_tensors"] > 0
    expected = figures["broadcast_seconds"] / figures["p2p"]["seconds"]
    assert figures["ratios"]["p2p over a broadcast"] == pytest.approx(expected)
    assert_positive(*figures["ratios"].values())
    for precision in ("bf16", "fp32"):
        delta = figures["delta"][precision]
        assert len(delta["changed_fraction"]) == 2
        assert all(
            part < whole for part, whole in zip(delta["delta xor"]["bytes"], delta["disk"]["bytes"], strict=True)
        )


@pytest.mark.full
def test_checkpoints_are_timed_beside_the_training_and_waited_for(tmp_path: Path):
    arguments = ["--gigabytes", "0.14", "--repeats", "1", "--folder", str(tmp_path)]
    (found,) = figures_of("checkpoints", tmp_path / "checkpoints.json", *arguments)["checkpoints"]
    assert found["bytes"] == pytest.approx(0.14e9, rel=0.3)
    assert_positive(*found.values())
    assert found["beside_held_s"] < found["beside_complete_s"]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints.json"]


@pytest.mark.full
def test_conversions_are_timed_against_copies(tmp_path: Path):
    arguments = ["--gigabytes", "0.12", "--pairs", "1", "--cold", "--folder", str(tmp_path)]
    figures = figures_of("conversion", tmp_path / "conversion.json", *arguments)
    rows = figures["rows"]
    assert figures["bytes"] == pytest.approx(0.12e9, rel=0.1)
    assert len(rows) == 5
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["seconds"] / row["copy_seconds"])
        assert_positive(row["ratio"], row["peak_gib"])
    assert [path.name for path in tmp_path.iterdir()] == ["conversion.json"]


needs_isolation = pytest.mark.skipif(what_is_missing() is not None, reason=f"faults: {what_is_missing()}")


def faults_of(tmp_path: Path, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """What benchmarks/chaos.py found in runs to which faults happened; nothing may be wrong."""
    sizes = ("--folder", str(tmp_path / "bench"), "--sft-updates", "60")
    figures = figures_of("chaos", tmp_path / "chaos.json", *sizes, *arguments, timeout_s=timeout_s)
    assert [fault["problem"] for fault in figures["faults"]] == [""] * len(figures["faults"])
    assert [leg["problems"] for leg in figures["legs"]] == [[]] * len(figures["legs"])
    assert_positive(*(fault["recovery_s"] for fault in figures["faults"]))
    return figures


def each(*kinds: str) -> list[str]:
    """Arguments that ask for a fault of each kind."""
    return ["--minutes", "0.5", "--faults", str(len(kinds)), *(word for kind in kinds for word in ("--kind", kind))]


@needs_isolation
@pytest.mark.timeout(900)
def test_an_asynchronous_run_to_which_faults_happen_accounts_for_every_group_and_leaves_nothing(tmp_path: Path):
    kinds = ("trainer's rank killed", "failing tools")
    figures = faults_of(tmp_path, "--mode", "async", *each(*kinds), timeout_s=880)
    assert sorted(fault["kind"] for fault in figures["faults"]) == sorted(kinds)
    (leg,) = figures["legs"]
    assert leg["ledger"]["taken"] == 8 * leg["steps"]
    assert leg["starts"] == 1


@needs_isolation
@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_a_deterministic_run_to_which_faults_happen_ends_as_one_to_which_none_did(tmp_path: Path, mode: str):
    kinds = ("trainer's rank killed", "driver killed", "checkpoint damaged")
    figures = faults_of(tmp_path, "--leg", f"{mode}_exact", *each(*kinds), timeout_s=1780)
    assert [leg["equal"] for leg in figures["legs"]] == [True]
    assert [fault["ended"] for fault in figures["faults"]].count(True) == 2


@needs_isolation
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_engines_to_which_faults_happen_are_replaced(tmp_path: Path):
    kinds = ("engine killed", "engine's packets dropped", "engines' node lost")
    figures = faults_of(tmp_path, "--leg", "disaggregated", *each(*kinds), timeout_s=1780)
    assert [leg["starts"] for leg in figures["legs"]] == [1]


@pytest.mark.full
def test_modes_of_rollout_are_compared_by_seconds_and_accuracy(tmp_path: Path):
    out, plot = tmp_path / "asynchrony.json", tmp_path / "curves.png"
    arguments = [
        "--folder", str(tmp_path / "bench"), "--case", "sync", "--case", "async, staleness 1", "--seeds", "1",
        "--steps", "1", "--sft-updates", "1", "--problems", "8", "--plot", str(plot),
        "rollout.sampling.max_new_tokens=8", "rollout.eval_sampling.max_new_tokens=8",
    ]  # fmt: skip
    figures = figures_of("asynchrony", out, *arguments)
    for name in ("sync", "async, staleness 1"):
        run = figures["results"][name]["0"]
        assert [step for step, _ in run["curve"]] == [0, 1]
        assert_positive(run["seconds"])
    assert plot.stat().st_size > 10_000


ONE_OF_EACH = ("trainer.num_ranks=1", "trainer.parallel.expert=1", "rollout.num_engines=1")


@pytest.mark.full
def test_slimrls_half_of_the_race_of_fixed_work(tmp_path: Path):
    sizes = ("--side", "slimrl", "--rounds", "2", "--repeats", "1", "--folder", str(tmp_path / "race"), *ONE_OF_EACH)
    figures = figures_of("race", tmp_path / "race.json", *sizes)
    totals = []
    for each in figures["rounds"]:
        (step,) = each["steps"]["slimrl"]
        assert (step["step"], step["tokens"], step["turns"]) == (3, 16 * 8 * 48, 16 * 8)
        assert each["seconds"]["slimrl"]["total"] == step["time/step_s"]
        totals.append(step["time/step_s"])
    assert figures["medians"].keys() == {"slimrl"}
    assert figures["medians"]["slimrl"]["total"] == pytest.approx(sum(totals) / 2)
    assert figures["ratio"] is None


@pytest.mark.full
def test_slimrls_half_of_the_race_with_a_tool_after_its_cold_start(tmp_path: Path):
    sizes = ("--rounds", "1", "--repeats", "1", "--sft-updates", "2", "--folder", str(tmp_path / "race"))
    short = ("rollout.sampling.max_new_tokens=8", *ONE_OF_EACH)
    figures = figures_of("race_agents", tmp_path / "race.json", "--side", "slimrl", *sizes, "--tolerance", "1", *short)
    ((step,),) = (each["steps"]["slimrl"] for each in figures["rounds"])
    assert 16 * 8 <= step["turns"] <= 6 * 16 * 8
    assert step["tokens"] <= 8 * step["turns"]
    assert_positive(*(figures["medians"]["slimrl"][phase] for phase in ("total", "rollout", "training", "resync")))


@pytest.mark.full
@pytest.mark.skipif(not TRL.is_dir(), reason="no environment of TRL; benchmarks/race.py makes it")
def test_trls_half_of_the_race_of_fixed_work(tmp_path: Path):
    sizes = ("--side", "TRL", "--rounds", "1", "--repeats", "1", "--folder", str(tmp_path / "race"), "--venv", str(TRL))
    figures = figures_of("race", tmp_path / "race.json", *sizes)
    ((step,),) = (each["steps"]["TRL"] for each in figures["rounds"])
    assert (step["tokens"], step["turns"]) == (16 * 8 * 48, 16 * 8)
    assert_positive(*figures["medians"]["TRL"].values())
    assert step["generation_s"] + step["training_s"] == pytest.approx(step["total_s"])


REAL = ("--prompts", "2", "--max-new-tokens", "16", "--rounds", "1", "--repeats", "1")


@pytest.mark.full
@pytest.mark.parametrize("name", ["b", "c"])
def test_slimrls_half_of_a_race_of_a_pretrained_model(tmp_path: Path, name: str):
    write_toy("qwen3_moe", tmp_path / "toy", ToySize(layers=2, max_position=1024), seed=0)
    model = ("--model", str(tmp_path / "toy"), "--folder", str(tmp_path / "race"), "--sft-updates", "2")
    arguments = ("--only", name, "--side", "slimrl", *model, *REAL, *ONE_OF_EACH)
    report = figures_of("race_real", tmp_path / "real.json", *arguments)["races"][name]
    ((step,),) = (each["steps"]["slimrl"] for each in report["rounds"])
    assert step["step"] == 2
    assert step["rollout/trajectories"] == 2 * 8
    assert step["sequence_tokens"] > step["tokens"]
    if name == "b":
        assert (step["tokens"], step["turns"]) == (2 * 8 * 6, 2 * 8)
    else:
        assert step["turns"] >= 2 * 8
    rates = report["rates"]["slimrl"]
    assert_positive(*rates.values())
    assert rates["generation_tokens_per_s"] == pytest.approx(step["tokens"] / step["time/rollout_s"])
    # A driver with Ray, a trainer and an engine, each of which imports torch, and no process that is not theirs.
    assert 1 < rates["peak_gib"] < 8
    assert max(rates[name] for name in rates if "_of_" in name) < 1
    assert report["ratio"] is None


@pytest.mark.full
@pytest.mark.skipif(not TRL.is_dir(), reason="no environment of TRL; benchmarks/race_real.py makes it")
def test_trls_half_of_a_race_of_a_pretrained_model(tmp_path: Path):
    write_toy("qwen3_moe", tmp_path / "toy", ToySize(layers=2), seed=0)
    model = ("--model", str(tmp_path / "toy"), "--folder", str(tmp_path / "race"), "--venv", str(TRL))
    report = figures_of("race_real", tmp_path / "real.json", "--only", "b", "--side", "TRL", *model, *REAL)["races"][
        "b"
    ]
    ((step,),) = (each["steps"]["TRL"] for each in report["rounds"])
    assert (step["tokens"], step["turns"]) == (2 * 8 * 6, 2 * 8)
    assert step["sequence_tokens"] > step["tokens"]
    assert_positive(*report["rates"]["TRL"].values())


@pytest.mark.full
@needs_namespaces
def test_episodes_of_software_repair_leave_nothing_and_are_judged_as_swe_bench_does(tmp_path: Path):
    environment_python("software_repair")
    folder = write_tasks(tmp_path / "data")
    prompt = {"id": "tally-1", "prompt": "total([1, 2]) is 2", "label": None, "metadata": METADATA}
    (folder / "train.jsonl").write_text(json.dumps(prompt) + "\n")
    sizes = ("--data", str(folder), "--episodes", "22", "--at-once", "4")
    figures = figures_of("software_repair", tmp_path / "repair.json", *sizes)
    assert (figures["episodes"], figures["leftovers"], figures["problems"]) == (22, [], [])
    policies = figures["policies"]
    assert sum(one["episodes"] for one in policies.values()) == 22
    resolved = {name for name, one in policies.items() if one["resolved"]}
    assert resolved == {"the patch", "processes left"}
    assert policies["expected to fail"]["stricter"] == policies["expected to fail"]["episodes"] == 2
    assert sum(one["disagreements"] for one in policies.values()) == 0
    assert_positive(figures["episodes_per_minute"], figures["cpu_s_per_episode"])


def test_episodes_of_an_environment_are_timed_alone_and_at_once(tmp_path: Path):
    environment_python("bfcl")
    sizes = ("--episodes", "6", "--at-once", "3", "--tasks", "2")
    alone, at_once = figures_of("environments", tmp_path / "environments.json", "bfcl", *sizes)["bfcl"]
    assert (alone["at_once"], at_once["at_once"]) == (1, 3)
    assert alone["solved_fraction"] == at_once["solved_fraction"] == 1
    assert_positive(*alone.values(), *at_once.values())


@pytest.mark.full
def test_the_exploitability_of_a_random_model_is_measured(tmp_path: Path):
    environment_python("open_spiel")
    write_toy("qwen3_moe", tmp_path / "model", ToySize(layers=2, hidden=64, moe_intermediate=64), 0)
    found = figures_of("exploitability", tmp_path / "out.json", str(tmp_path / "model"))[str(tmp_path / "model")]
    # Nobody can win more than the stakes; a model that says any token says no move.
    assert 0 < found["exploitability"] < 1
    assert 0 < found["legal"] < 0.01
