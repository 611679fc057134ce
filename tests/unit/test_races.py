"""Races against TRL: the work that they check, their ratio, the demonstrations of the one with a tool, and the limits
beside the race of a pretrained model."""

import importlib
import json
import random
from pathlib import Path

import pytest
from slimrl_tools.toy.toy_tokenizer import build_tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    """Imports a file of benchmarks/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


def race_of(bench, **changes):
    work = {"model": Path(), "prompts": Path(), "slimrl": (), "trl": {}, "tools": False}
    return bench("rounds").Race(**work, **{"tokens": 100, "turns": 10, "tolerance": 0.1, **changes})


def test_steps_of_the_expected_work_are_kept(bench):
    steps = [{"tokens": 100, "turns": 9.5}, {"tokens": 118, "turns": 10}]
    assert race_of(bench)._checked(steps) == steps


@pytest.mark.parametrize(("key", "value"), [("tokens", 111), ("turns", 8.9)])
def test_other_work_is_refused(bench, key, value):
    with pytest.raises(ValueError, match=f"a step sampled {value:.0f} {key}, not"):
        race_of(bench)._checked([{"tokens": 100, "turns": 10, key: value}])


def test_fixed_work_allows_no_difference(bench):
    with pytest.raises(ValueError, match="a step sampled 101 tokens, not 100"):
        race_of(bench, tolerance=0)._checked([{"tokens": 101, "turns": 10}])


def round_of(trl: tuple[int, int], slimrl: tuple[int, int]):
    work = {"TRL": trl, "slimrl": slimrl}
    return {"steps": {side: [{"tokens": tokens, "turns": turns}] for side, (tokens, turns) in work.items()}}


def test_work_that_nobody_knows_before_is_compared_between_the_sides_over_all_rounds(bench):
    race = race_of(bench, tokens=None, turns=None)
    assert race._checked([{"tokens": 7, "turns": 3}])
    race.compare_work([round_of((100, 10), (115, 10)), round_of((110, 10), (100, 10))])
    with pytest.raises(ValueError, match="other numbers of tokens in a step: 100 of TRL and 112 of slimrl"):
        race.compare_work([round_of((100, 10), (115, 10)), round_of((100, 10), (109, 10))])
    with pytest.raises(ValueError, match="other numbers of turns in a step: 12 of TRL and 10 of slimrl"):
        race.compare_work([round_of((100, 12), (100, 10))])
    race.compare_work([{"steps": {"slimrl": [{"tokens": 7, "turns": 3}]}}])


def test_the_ratio_is_above_1_if_slimrl_is_faster_and_needs_both_sides(bench):
    ratio_of = bench("rounds").ratio_of
    assert ratio_of({"TRL": {"total": 3.0}, "slimrl": {"total": 1.5}}) == 2
    assert ratio_of({"slimrl": {"total": 1.5}}) is None


def test_a_folder_that_is_no_environment_of_trl_is_left_alone(bench, tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(ValueError, match="remove it"):
        bench("sides").make_venv(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_demonstration_counts_down_and_calls_in_every_turn_but_the_last(bench):
    messages = bench("race_agents").conversation(random.Random(0), [3, 1])
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in messages] == roles
    asking, result, answer = messages[2:]
    (call,) = asking["tool_calls"]
    expression = call["function"]["arguments"]["expression"]
    assert messages[1]["content"] == f"Compute {expression}."
    assert result["content"] == str(eval(expression))
    assert asking["content"] == "2: 3 2 1"
    assert answer["content"] == f"1: 1 {expression} = \\boxed{{{result['content']}}}."


def test_the_expected_tokens_are_those_of_drawn_demonstrations(bench):
    agents, rng, tokenizer = bench("race_agents"), random.Random(7), build_tokenizer()
    counts = []
    for _ in range(400):
        lengths = [rng.choice(agents.LENGTHS) for _ in range(rng.choice(agents.TURNS))]
        text = tokenizer.apply_chat_template(agents.conversation(rng, lengths), tokenize=False)
        turns = text.split("<|im_start|>assistant\n")[1:]
        counts.append(sum(len(tokenizer.encode(turn.split("<|im_end|>")[0])) + 1 for turn in turns))
    assert agents.mean_tokens() == pytest.approx(sum(counts) / len(counts), rel=0.12)


def test_the_batch_of_a_step_is_whole_in_trl_s_micro_batches(bench):
    races = bench("real_races")
    for prompts in (1, 2, 16):
        for micro_batch in (races.MICRO_BATCH, races.MICRO_BATCH_OF_TURNS):
            batch = races._batch(prompts, micro_batch)
            of_rank = batch["per_device_train_batch_size"] * batch["gradient_accumulation_steps"]
            assert 2 * of_rank == prompts * 8


def write_config(folder: Path, **changes) -> Path:
    config = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu", "rope_theta": 10000.0,
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False, **changes,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def work_of(bench, folder: Path, **changes):
    limits = bench("limits")
    shape, parameters = limits.sizes_of(write_config(folder))
    work = {"tokens": 40, "sequence_tokens": 60, "trajectories": 4, "processes": 2, **changes}
    return limits.StepWork(shape=shape, parameters=parameters, **work)


LAYER = 2 * 12 * 24 + 2 * 12 * 8 + 3 * 12 * 20 + 2 * 12
PARAMETERS = 100 * 12 + 3 * LAYER + 12
"""In a layer queries and outputs, keys and values, the MLP and two norms; the embedding is the head too."""


def test_operations_of_a_step_are_six_for_each_parameter_and_token_and_those_of_causal_attention(bench, tmp_path):
    work = work_of(bench, tmp_path)
    # Scores and their products with values, 2 operations each, over half of 15 positions in the mean.
    attention = 3 * (2 * 2 * 6 * 4) * 15 / 2
    assert work.training_flops == pytest.approx(60 * (6 * PARAMETERS + 3 * attention))
    assert work.generation_flops == pytest.approx(work.training_flops / 3)


def test_bytes_of_decoding_are_those_of_each_step_of_each_process(bench, tmp_path):
    # Each of two processes decodes two trajectories: 10 tokens after prompts of 5.
    cached = 2 * 3 * 2 * 4 * 4
    expected = sum(2 * 4 * PARAMETERS + 4 * cached * (5 + sampled + 0.5) for sampled in range(10))
    assert work_of(bench, tmp_path).decoding_bytes == pytest.approx(expected)


def test_rates_are_medians_of_the_steps_and_the_rest_of_a_step_is_training(bench, tmp_path):
    limits = bench("limits")
    processor = limits.Processor(flops_per_s=1e6, bytes_per_s=1e6)
    steps = [
        {"tokens": 40, "sequence_tokens": 60, "generation_s": 2.0, "total_s": total, "peak_bytes": peak}
        for total, peak in ((3.0, 2**30), (6.0, 3 * 2**30), (62.0, 2**30))
    ]
    rates = bench("race_real").rates_of(write_config(tmp_path), "TRL", steps, 0.5, processor)
    work = work_of(bench, tmp_path)
    assert rates["generation_tokens_per_s"] == 20
    assert rates["training_tokens_per_s"] == 15
    assert rates["training_of_peak"] == pytest.approx(work.training_flops / 4 / 1e6)
    assert rates["decoding_of_bandwidth"] == pytest.approx(work.decoding_bytes / 2 / 1e6)
    assert rates["peak_gib"] == 3
