"""The simulator against closed forms: constant times, bounds of heavy-tailed ones, and recorded runs."""

import json
import random
from dataclasses import replace
from math import inf

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.rollout import RolloutConfig, TooOld
from slimrl.estimates.simulator.cluster import Cluster
from slimrl.estimates.simulator.distribution import constant, read_distribution
from slimrl.estimates.simulator.engines import Engines
from slimrl.estimates.simulator.schedule import ONE_STEP_OFF, SYNC, all_schedules, asynchronous
from slimrl.estimates.simulator.simulation import Simulation
from slimrl.estimates.simulator.trace import read_trace
from slimrl.estimates.simulator.workload import DrawnWorkload, GroupWork, RecordedWorkload, Turn, drawn_workload

CLUSTER = Cluster(
    trainer_ranks=4,
    engine_gpus=4,
    num_engines=2,
    slots=100,
    decoding=100,
    step_s=lambda sequences: 1.0,
    train_s=4.0,
    resync_s=1.0,
)
CONSTANT = RecordedWorkload([GroupWork([[Turn(10, 0)], [Turn(10, 0)]])])
"""Two trajectories of 10 s"""
ROLLOUT = RolloutConfig(
    max_trajectory_tokens=5000, max_turns=3, samples_per_prompt=4, tool_timeout_s=200.0, prompts_per_step=8
)


def simulate(schedule, workload=CONSTANT, *, batch=2, steps=6, warm_up=4, deadline_s=inf, **cluster):
    simulation = Simulation(
        replace(CLUSTER, **cluster),
        workload,
        schedule,
        batch=batch,
        steps=steps,
        warm_up=warm_up,
        deadline_s=deadline_s,
    )
    return simulation.run()


def heavy_tailed(seed: int = 0, tool: str = "pareto:1:1.1") -> DrawnWorkload:
    return drawn_workload(
        ROLLOUT,
        turns=None,
        turn_tokens=read_distribution("", "lognormal:20:1.5"),
        tool_s=read_distribution("", tool),
        prompt_tokens=100,
        seed=seed,
    )


@pytest.mark.parametrize("warm_up", [0, 3])
def test_a_synchronous_step_is_rollout_training_and_resync(warm_up):
    outcome = simulate(SYNC, warm_up=warm_up)
    assert outcome.seconds == pytest.approx(6 * (10 + 4 + 1))
    assert outcome.steps_per_hour == pytest.approx(3600 / 15)
    assert outcome.trajectories_per_s == pytest.approx(4 / 15)
    assert outcome.trainer_idle == pytest.approx(10 / 15)
    assert outcome.engines_idle == pytest.approx(4 / 15)
    assert outcome.slots_used == pytest.approx(4 / 100 * 10 / 15)
    assert outcome.ages == {0: 12}
    assert outcome.durations_s == [pytest.approx(10)] * 24


def test_engines_are_idle_while_all_trajectories_wait_for_tools_but_keep_their_slots():
    work = RecordedWorkload([GroupWork([[Turn(4, 3.0), Turn(3, 0)]])])
    outcome = simulate(SYNC, work)
    assert outcome.seconds == pytest.approx(6 * 15)
    assert outcome.engines_idle == pytest.approx(7 / 15)
    assert outcome.slots_used == pytest.approx(2 / 100 * 10 / 15)


def test_an_engine_without_a_sequence_is_idle():
    assert simulate(SYNC, num_engines=8).engines_idle == pytest.approx((4 + 10 / 2) / 15), "4 sequences, 8 engines"


@pytest.mark.parametrize(("train_s", "period"), [(4.0, 11), (20.0, 21)])
def test_one_step_off_takes_the_longer_of_rollout_and_training_and_the_resync(train_s, period):
    outcome = simulate(ONE_STEP_OFF, train_s=train_s)
    assert outcome.seconds == pytest.approx(6 * period)
    assert outcome.ages == {1: 12}
    assert outcome.trainer_idle == pytest.approx((period - 1 - train_s) / period)
    assert outcome.engines_idle == pytest.approx((period - 1 - 10) / period)


@pytest.mark.parametrize("staleness", [2, 4, 8])
@pytest.mark.parametrize("too_old", TooOld)
def test_asynchronous_throughput_is_the_lower_of_the_trainers_and_the_engines_rate(staleness, too_old):
    schedule = asynchronous(staleness, too_old)
    # The trainer: 20 s and 1 s of resync a step.
    assert simulate(schedule, train_s=20.0, warm_up=20).seconds == pytest.approx(6 * 21)
    # The engines: 4 slots, 4 trajectories of 10 s a step, and 1 s in which they pause.
    outcome = simulate(schedule, slots=4, warm_up=20, steps=10)
    assert outcome.seconds == pytest.approx(10 * 11)
    assert outcome.engines_idle == pytest.approx(0)
    assert outcome.trainer_idle == pytest.approx(1 - 5 / 11)


def test_engines_that_share_their_speed_take_as_long_for_many_sequences_as_all_tokens_do():
    outcome = simulate(SYNC, step_s=lambda sequences: 0.5 * sequences)
    assert outcome.seconds == pytest.approx(6 * (4 * 10 * 0.5 + 5))


@pytest.mark.parametrize("limited", ["slots", "decoding"])
def test_trajectories_beyond_the_slots_or_the_cache_wait(limited):
    outcome = simulate(SYNC, **{limited: 2})
    assert outcome.seconds == pytest.approx(6 * (20 + 5))
    assert max(outcome.durations_s) == pytest.approx(10 if limited == "slots" else 20)


def test_a_group_is_as_old_as_its_first_token():
    # One sequence decodes at a time, so that the third group of version 0 begins to decode under version 1.
    single = RecordedWorkload([GroupWork([[Turn(10, 0)]])])
    outcome = simulate(asynchronous(2, TooOld.drop), single, batch=1, decoding=1, warm_up=0)
    assert outcome.ages == {0: 1, 1: 5}


def test_filtered_and_failed_groups_are_replaced_and_not_trained_on():
    ends = ("finished", "filtered", "finished", "failed")
    work = RecordedWorkload([GroupWork([[Turn(10, 0)]], end) for end in ends])
    outcome = simulate(SYNC, work)
    assert outcome.trajectories == 6 * 2
    assert len(outcome.durations_s) == 6 * 4
    # Of the two groups of a step one is trained on; the next does not count, the one after it does.
    assert outcome.seconds == pytest.approx(6 * (30 + 5))


def test_a_trajectory_ends_at_its_deadline_wherever_it_is():
    work = RecordedWorkload([GroupWork([[Turn(50, 0)], [Turn(2, 50.0), Turn(1, 0)], [Turn(5, 0)]])])
    outcome = simulate(SYNC, work, deadline_s=20.0)
    assert outcome.seconds == pytest.approx(6 * (20 + 5))
    assert outcome.aborted == 6 * 2 * 2
    assert outcome.engines_idle == pytest.approx(4 / 25), "what was aborted does not decode on"
    assert max(outcome.durations_s) == pytest.approx(20)


@pytest.mark.parametrize("too_old", TooOld)
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_heavy_tails_keep_the_bound(staleness, too_old):
    outcome = simulate(asynchronous(staleness, too_old), heavy_tailed(), batch=4, steps=60)
    assert sum(outcome.ages.values()) == 60 * 4
    if too_old is not TooOld.train:
        assert max(outcome.ages) <= staleness
    if staleness in (1, 2):
        assert (outcome.dropped > 0) == (too_old is TooOld.drop)
        assert (max(outcome.ages) > staleness) == (too_old is TooOld.train)


def test_a_seed_gives_the_same_work_in_every_mode_and_another_seed_other_work():
    for schedule in all_schedules(TooOld.drop):
        first, again, other = (simulate(schedule, heavy_tailed(seed)) for seed in (0, 0, 1))
        assert first == again
        assert first != other
    assert heavy_tailed(3).group(7) == heavy_tailed(3).group(7) != heavy_tailed(3).group(8)


def test_asynchrony_hides_a_heavy_tail():
    def rate(schedule):
        return simulate(schedule, heavy_tailed(), batch=8, steps=30, train_s=100.0).steps_per_hour

    rates = [rate(schedule) for schedule in (SYNC, ONE_STEP_OFF, asynchronous(4, TooOld.drop))]
    assert sorted(rates) == rates
    assert rates[2] > 2 * rates[0]


def pool(limit=10, step_s=float):
    started = []
    return Engines(limit, step_s, started.append), started


def test_sequences_share_the_speed_from_when_they_come():
    # A step takes as many seconds as sequences: alone 5 tokens in 5 s, then 5 of each in 10 s, then 5 in 5 s.
    engines, started = pool()
    engines.submit("a", 10)
    engines.elapse(5)
    engines.submit("b", 10)
    assert engines.seconds_to_end() == pytest.approx(10)
    engines.elapse(10)
    assert engines.pop() == "a"
    assert engines.seconds_to_end() == pytest.approx(5)
    assert started == ["a", "b"]


def test_nothing_is_sampled_in_a_pause():
    engines, started = pool()
    engines.submit("a", 10)
    engines.pause()
    engines.submit("b", 10)
    engines.elapse(100)
    assert engines.seconds_to_end() == inf
    assert started == ["a"]
    engines.resume()
    assert started == ["a", "b"]
    assert engines.seconds_to_end() == pytest.approx(20)


def test_a_cancelled_sequence_gives_its_place_to_the_next():
    engines, started = pool(limit=1)
    for name, tokens in (("a", 3), ("b", 4), ("c", 5)):
        engines.submit(name, tokens)
    engines.cancel("b")
    assert started == ["a"]
    engines.cancel("a")
    assert started == ["a", "c"]
    assert engines.seconds_to_end() == pytest.approx(5)
    engines.elapse(5)
    assert engines.pop() == "c"
    assert engines.num_decoding == 0
    assert engines.seconds_to_end() == inf


def test_distributions_are_those_that_they_say():
    rng = random.Random(0)
    lognormal = sorted(read_distribution("", "lognormal:30:0.5").draw(rng) for _ in range(4001))
    assert lognormal[2000] == pytest.approx(30, rel=0.05)
    assert lognormal[3365] / lognormal[2000] == pytest.approx(2.718**0.5, rel=0.05), "one sigma above the median"
    pareto = sorted(read_distribution("", "pareto:2:1.5").draw(rng) for _ in range(4000))
    assert pareto[0] >= 2
    assert sum(value > 8 for value in pareto) / 4000 == pytest.approx((2 / 8) ** 1.5, rel=0.1)
    assert read_distribution("", "3.5").draw(rng) == 3.5


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "nan", "inf", "lognormal:3", "lognormal:3:x", "pareto:1:0", "gamma:1:2", "lognormal:1:2:3", ":1:2"],
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match=r"--tool .*: must be a number, lognormal:MEDIAN:SIGMA or pareto"):
        read_distribution("--tool", text)


def test_without_options_trajectories_are_as_long_as_allowed_as_in_a_plan():
    rollout = replace(ROLLOUT, max_trajectory_tokens=10_240, max_turns=1)
    rollout.sampling.max_new_tokens = 8192
    work = drawn_workload(rollout, turns=None, turn_tokens=None, tool_s=None, prompt_tokens=None, seed=0)
    assert work.group(0).trajectories == [[Turn(8192, 0.0)]] * 4
    assert work.lengths() == (10_240, 10_240 - 8192 / 2)


def test_the_recipes_limits_cut_off_what_is_drawn():
    rollout = replace(ROLLOUT, max_trajectory_tokens=1000, max_turns=3, tool_timeout_s=7.0)
    rollout.sampling.max_new_tokens = 400
    work = drawn_workload(
        rollout, turns=constant(9), turn_tokens=constant(450), tool_s=constant(30), prompt_tokens=100, seed=0
    )
    assert work.group(0).trajectories[0] == [Turn(400, 7.0), Turn(400, 7.0), Turn(100, 0.0)]
    cut = drawn_workload(rollout, turns=None, turn_tokens=constant(450), tool_s=constant(1), prompt_tokens=600, seed=0)
    assert cut.group(0).trajectories[0] == [Turn(400, 0.0)], "no room for a second turn"


def test_a_prompt_as_long_as_a_trajectory_is_refused():
    with pytest.raises(ValueError, match=r"--prompt-tokens 5000: must be at least 0 and below .* 5,000"):
        drawn_workload(ROLLOUT, turns=None, turn_tokens=None, tool_s=None, prompt_tokens=5000, seed=0)


def recorded_run(folder, groups, steps=3):
    """A recorded run with steps of 15 s, of which 9 s are rollout, 0.5 s a wait and 1.5 s resync."""
    step = {"time/step_s": 15.0, "time/rollout_s": 9.0, "time/drain_s": 0.5, "time/resync_s": 1.5}
    first = step | {"time/step_s": 100.0}
    lines = [{"step": 0, "time/resync_s": 9.0}, *({"step": n + 1, **(step if n else first)} for n in range(steps))]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in groups))
    return folder


def recipe() -> Recipe:
    plain = Recipe()
    return replace(plain, rollout=replace(plain.rollout, num_engines=3, max_concurrency_per_engine=5))


GROUPS = [
    {"group": 0, "end": "taken", "begun": 100.0, "ended": [104.0, 110.0]},
    {"group": 2, "end": "dropped", "begun": 100.0, "ended": [104.0, None]},
    {"group": 1, "end": "filtered", "begun": 101.0, "ended": [102.0, 103.0]},
]


def test_a_recorded_run_is_replayed_with_its_times(tmp_path):
    run = recorded_run(tmp_path / "run", GROUPS)
    with (run / "groups.jsonl").open("a") as file:
        file.write('{"group": 3, "en')  # by a run that was killed
    cluster, work, notes = read_trace(run, recipe())
    assert (cluster.train_s, cluster.resync_s) == (pytest.approx(4.0), pytest.approx(1.5)), "without the first step"
    assert (cluster.num_engines, cluster.slots, cluster.step_s(7)) == (3, 15, 1.0)
    assert [work.group(n) for n in range(3)] == [
        GroupWork([[Turn(4.0, 0.0)], [Turn(10.0, 0.0)]], "finished"),
        GroupWork([[Turn(1.0, 0.0)], [Turn(2.0, 0.0)]], "filtered"),
        GroupWork([[Turn(4.0, 0.0)], [Turn(10.0, 0.0)]], "finished"),
    ]
    assert [note.split()[0] for note in notes[:2]] == ["2", "1"]
    assert notes[2:] == ["the times are means of 2 steps, few for a comparison"]
    outcome = Simulation(cluster, work, SYNC, batch=1, steps=5).run()
    assert outcome.seconds == pytest.approx(5 * (10 + 5.5) + 4 * 2), (
        "from the second step on, a group of 2 s is replaced"
    )


def test_the_wait_for_an_evaluation_is_neither_training_nor_resync(tmp_path):
    run = recorded_run(tmp_path / "run", GROUPS)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[2:]:
        line["time/step_s"] += 30.0
        line["time/eval_wait_s"] = 30.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    cluster, _, _ = read_trace(run, recipe())
    assert (cluster.train_s, cluster.resync_s) == (pytest.approx(4.0), pytest.approx(1.5))


def test_a_trajectory_lasts_from_its_slot_on_where_that_was_recorded(tmp_path):
    groups = [GROUPS[0] | {"started": [101.0, 108.0]}]
    _, work, _ = read_trace(recorded_run(tmp_path / "run", groups), recipe())
    assert work.group(0).trajectories == [[Turn(3.0, 0.0)], [Turn(2.0, 0.0)]]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "there is no groups.jsonl. A run of `slimrl train` with engines writes it"),
        (GROUPS[1:], "holds no group that was trained on"),
        ([{"group": 3}], "groups.jsonl:1: not a group of a run"),
        ([7], "groups.jsonl:1: not a group of a run"),
    ],
)
def test_a_folder_without_recorded_groups_is_refused(tmp_path, groups, message):
    folder = recorded_run(tmp_path / "run", groups or [])
    if groups is None:
        (folder / "groups.jsonl").unlink()
    with pytest.raises(ValueError, match=message):
        read_trace(folder, recipe())


def test_a_run_without_a_whole_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no whole step"):
        read_trace(recorded_run(tmp_path / "run", GROUPS, steps=0), recipe())
