"""Where trainer ranks and engines go, by hand-made clusters."""

import pytest

from slimrl.base.errors import StageError
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.estimates.resync.command import planned_cluster
from slimrl.launch.submit import process_counts
from slimrl.runtime.cluster.placement import Node, Placement, most_slots, place, place_on_fewest, place_what_fits


def cluster(*slots: int) -> list[Node]:
    """Nodes a, b, c ... of so many slots."""
    names = "abcdefgh"
    return [
        Node(node_id=names[i] * 8, name=names[i], address=f"10.0.0.{i}", slots=count) for i, count in enumerate(slots)
    ]


def recipe(*, colocated: bool = True, engine_tp: int = 1, **parallel: int) -> Recipe:
    made = Recipe()
    made.trainer.parallel = ParallelConfig(**parallel)
    made.resync.transport = TransportName.p2p
    made.rollout.colocated = colocated
    made.rollout.engine_tp = engine_tp
    return made


def shown(placement: Placement) -> tuple[str, list[str]]:
    """Nodes of ranks as letters; nodes and numbers of each engine's slots."""
    ranks = "".join(slot.node.name for slot in placement.ranks)
    return ranks, ["".join(f"{slot.node.name}{slot.number}" for slot in slots) for slots in placement.engines]


def test_ranks_fill_nodes_in_order_and_colocated_engines_take_their_slots():
    placement = place(recipe(tensor=2, engine_tp=4), cluster(8, 8), num_ranks=16, num_engines=4)
    assert shown(placement) == ("a" * 8 + "b" * 8, ["a0a1a2a3", "a4a5a6a7", "b0b1b2b3", "b4b5b6b7"])
    assert [placement.num_processes[slot] for slot in placement.slots] == [2] * 16


def test_separate_engines_take_what_the_ranks_leave():
    placement = place(recipe(colocated=False, engine_tp=4), cluster(8, 8), num_ranks=6, num_engines=2)
    assert shown(placement) == ("aaaaaa", ["b0b1b2b3", "b4b5b6b7"])
    assert {placement.num_processes[slot] for slot in placement.slots} == {1}
    assert len(placement.slots) == 14


def test_ipc_engines_are_where_the_trainer_is_though_there_are_more_than_ranks():
    made = recipe(colocated=False)
    made.resync.transport = TransportName.ipc
    assert shown(place(made, cluster(3, 8), num_ranks=1, num_engines=3)) == ("a", ["a0", "a1", "a2"])


@pytest.mark.parametrize(
    ("parallel", "slots", "ranks"),
    [
        # Two groups of three on a node of eight, as none may be cut.
        ({"tensor": 3}, (8, 8), "aaaaaabbbbbb"),
        ({"tensor": 2, "expert": 4}, (6, 8), "aaaabbbbbbbb"),
        # Experts over more ranks than a node has: only tensor-parallel groups are kept together.
        ({"tensor": 2, "expert": 16}, (7, 8), "aaaaaabbbbbb"),
        ({"tensor": 4}, (6, 6), "aaaaaabbbbbb"),
        ({"expert": 2}, (1, 1), "ab"),
    ],
)
def test_parallel_groups_stay_on_a_node_where_they_can(parallel, slots, ranks):
    placement = place(recipe(**parallel), cluster(*slots), num_ranks=len(ranks), num_engines=0)
    assert shown(placement) == (ranks, [])


def test_engines_alone_need_no_trainer():
    assert shown(place(recipe(engine_tp=2), cluster(4), num_ranks=0, num_engines=2)) == ("", ["a0a1", "a2a3"])


def test_a_cluster_that_has_what_the_run_could_use_at_most_is_always_enough():
    for colocated in (True, False):
        made = recipe(colocated=colocated, engine_tp=3)
        slots = most_slots(made, num_ranks=2, num_engines=2)
        assert len(place(made, cluster(slots), num_ranks=2, num_engines=2).engines) == 2


@pytest.mark.parametrize(
    ("made", "num_ranks", "num_engines", "engines"),
    [
        # Beside the ranks, on the node that they leave half empty.
        (recipe(colocated=False, engine_tp=4), 4, 1, [("node0", 4)]),
        # An engine of six has a node to itself, whatever its neighbours leave.
        (recipe(colocated=False, engine_tp=6), 8, 4, [(f"node{number}", 0) for number in (1, 2, 3, 4)]),
        (recipe(engine_tp=4), 16, 4, [("node0", 0), ("node0", 4), ("node1", 0), ("node1", 4)]),
    ],
)
def test_a_planned_cluster_has_as_few_nodes_as_the_run_needs(made, num_ranks, num_engines, engines):
    placement, count = place_on_fewest(made, 8, num_ranks=num_ranks, num_engines=num_engines)
    assert [(slots[0].node.name, slots[0].number) for slots in placement.engines] == engines
    nodes = cluster(*[8] * count)
    assert shown(place(made, nodes, num_ranks=num_ranks, num_engines=num_engines))[0] == "".join(
        "abcdefgh"[int(slot.node.name.removeprefix("node"))] for slot in placement.ranks
    )
    with pytest.raises(StageError):
        place(made, nodes[:-1], num_ranks=num_ranks, num_engines=num_engines)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (recipe(colocated=False, engine_tp=16), r"rollout.engine_tp = 16, and each engine is on one node"),
        (recipe(engine_tp=4), r"rollout.num_engines = 3 with rollout.engine_tp = 4 do not fit on those that"),
        (recipe(engine_tp=8), r"rollout.num_engines = 3 with rollout.engine_tp = 8 do not fit on those that"),
        (recipe(engine_tp=16), r"8 GPUs is enough: rollout.engine_tp = 16, and each engine is on one node"),
    ],
)
def test_engines_for_which_no_number_of_nodes_is_enough_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        place_on_fewest(made, 8, num_ranks=8, num_engines=3)


@pytest.mark.parametrize(
    ("made", "slots", "num_ranks", "num_engines", "message"),
    [
        (recipe(), (8, 4), 16, 0, r"needs 16 GPUs for trainer ranks; there are GPUs on: a 8, b 4"),
        (
            recipe(colocated=False, engine_tp=4),
            (8, 8),
            8,
            3,
            "8 GPUs for trainer ranks and 3 x 4 others for engines",
        ),
        (recipe(engine_tp=16), (8, 8), 16, 1, "1 x 16 GPUs for engines on .* on one node.*in block FP8"),
        (recipe(), (), 1, 0, "no node"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_what_is_there_and_what_is_needed(
    made, slots, num_ranks, num_engines, message
):
    with pytest.raises(StageError, match=message):
        place(made, cluster(*slots), num_ranks=num_ranks, num_engines=num_engines, unit="GPUs")


def test_a_planned_cluster_may_need_a_node_for_each_process_and_engines_alone_need_no_trainers_node():
    placement, count = place_on_fewest(recipe(colocated=False), 1, num_ranks=2, num_engines=2)
    assert (shown(placement)[0], count) == ("node0node1", 4)
    placement, count = place_on_fewest(recipe(engine_tp=4), 8, num_ranks=0, num_engines=5)
    assert ([slots[0].number for slots in placement.engines], count) == ([0, 4, 0, 4, 0], 3)


@pytest.mark.parametrize(("slots", "fewest", "engines"), [(5, 1, 3), (3, 1, 2), (2, 1, 1), (3, 2, 2)])
def test_a_run_starts_with_as_many_engines_as_there_is_room_for(slots, fewest, engines):
    made = recipe(colocated=False)
    made.rollout.min_engines, made.resync.transport = fewest, TransportName.disk
    assert len(place_what_fits(made, cluster(slots), num_ranks=1, num_engines=3).engines) == engines


@pytest.mark.parametrize(("slots", "fewest", "named"), [(1, 1, "1 x 1"), (2, 2, "2 x 1"), (3, 0, "3 x 1")])
def test_a_run_without_room_for_the_fewest_engines_is_refused(slots, fewest, named):
    made = recipe(colocated=False)
    made.rollout.min_engines, made.resync.transport = fewest, TransportName.disk
    with pytest.raises(StageError, match=f"needs 1 slots for trainer ranks and {named} others for engines"):
        place_what_fits(made, cluster(slots), num_ranks=1, num_engines=3)


def over_nodes(**changes) -> Recipe:
    made = recipe(colocated=changes.pop("colocated", False), engine_tp=changes.pop("engine_tp", 4))
    made.rollout.engine_nodes = changes.pop("engine_nodes", 2)
    assert not changes
    return made


def test_an_engine_over_two_nodes_takes_as_many_slots_on_each():
    placement = place(over_nodes(), cluster(8, 4, 4), num_ranks=8, num_engines=2)
    assert shown(placement) == ("a" * 8, ["b0b1c0c1", "b2b3c2c3"])
    # A node with too little room for a part is left out.
    assert shown(place(over_nodes(), cluster(3, 1, 2), num_ranks=1, num_engines=1)) == ("a", ["a1a2c0c1"])
    assert shown(place(over_nodes(engine_tp=2), cluster(2, 1), num_ranks=1, num_engines=1)) == ("a", ["a1b0"])


def test_an_engine_over_nodes_is_never_on_fewer():
    with pytest.raises(StageError, match=r"1 x 4 others for engines, each engine on 2 nodes; there are slots on: a 8"):
        place(over_nodes(), cluster(8), num_ranks=1, num_engines=1)
    placement, count = place_on_fewest(over_nodes(engine_tp=16), 8, num_ranks=8, num_engines=2)
    assert count == 5
    assert shown(placement)[1][0] == "".join(f"node{node}{number}" for node in (1, 2) for number in range(8))
    with pytest.raises(ValueError, match=r"each engine is on 2 nodes. Spread each engine over several nodes"):
        place_on_fewest(over_nodes(engine_tp=32), 8, num_ranks=8, num_engines=1)


def test_a_colocated_engine_over_two_nodes_is_on_the_trainer_s_ranks_of_both():
    made = over_nodes(colocated=True)
    placement = place(made, cluster(4, 4), num_ranks=8, num_engines=2)
    assert shown(placement) == ("aaaabbbb", ["a0a1b0b1", "a2a3b2b3"])
    with pytest.raises(StageError) as raised:
        place(made, cluster(8, 8), num_ranks=8, num_engines=1, unit="GPUs")
    assert str(raised.value) == (
        "rollout.engine_nodes = 2, but the trainer, whose GPUs the engines share, fills only a. "
        "Use rollout.engine_nodes 1, or more trainer ranks."
    )
    # Nodes that are enough, but too small.
    with pytest.raises(StageError, match="the cluster is too small"):
        place(made, cluster(1, 1), num_ranks=2, num_engines=1)


def with_teacher(*, tp: int = 1, nodes: int = 1, **changes) -> Recipe:
    made = recipe(**changes)
    made.teacher.path, made.teacher.engine_tp, made.teacher.engine_nodes = "teacher", tp, nodes
    return made


def of_teachers(placement: Placement) -> list[str]:
    return ["".join(f"{slot.node.name}{slot.number}" for slot in slots) for slots in placement.teachers]


def test_a_teacher_takes_slots_that_nobody_else_has():
    placement = place(with_teacher(tp=2, engine_tp=4), cluster(8, 4), num_ranks=8, num_engines=2, num_teachers=2)
    assert shown(placement) == ("a" * 8, ["a0a1a2a3", "a4a5a6a7"])
    assert of_teachers(placement) == ["b0b1", "b2b3"]
    assert len(placement.slots) == 12
    # Beside engines with slots of their own, and over two nodes.
    made = with_teacher(tp=4, nodes=2, colocated=False)
    placement = place(made, cluster(5, 4), num_ranks=2, num_engines=1, num_teachers=1)
    assert (shown(placement)[1], of_teachers(placement)) == (["a2"], ["a3a4b0b1"])
    assert {placement.num_processes[slot] for slot in placement.slots} == {1}


def test_a_cluster_without_room_for_the_teacher_is_refused_with_what_is_free():
    with pytest.raises(StageError) as raised:
        place(with_teacher(tp=4), cluster(4, 3), num_ranks=4, num_engines=4, num_teachers=1, unit="GPUs")
    assert str(raised.value) == (
        "the cluster is too small: the teacher needs 1 x 4 GPUs of its own, each engine on 1 node; free beside the "
        "run's other processes are GPUs on: a 0, b 3"
    )


def test_a_planned_cluster_has_room_for_the_teacher():
    made = with_teacher(tp=8)
    placement, count = place_on_fewest(made, 8, num_ranks=8, num_engines=8, num_teachers=2)
    assert ([slots[0].node.name for slots in placement.teachers], count) == (["node1", "node2"], 3)
    assert most_slots(made, num_ranks=8, num_engines=8, num_teachers=2) == 32
    # The most that a plan tries is enough.
    over = with_teacher(tp=8, nodes=8)
    assert place_on_fewest(over, 1, num_ranks=1, num_engines=1, num_teachers=1)[1] == 9
    with pytest.raises(
        ValueError, match=r"teacher.engine_tp = 16, and each engine is on 1 node. Raise teacher.engine_n"
    ):
        place_on_fewest(with_teacher(tp=16), 8, num_ranks=8, num_engines=8, num_teachers=1)


def test_older_versions_take_slots_of_their_own_after_the_teacher_and_are_counted_in_a_plan():
    made = with_teacher(engine_tp=2)
    placement = place(made, cluster(4, 4), num_ranks=4, num_engines=2, num_teachers=1, num_past=1)
    assert of_teachers(placement) == ["b0"]
    assert ["".join(f"{slot.node.name}{slot.number}" for slot in slots) for slots in placement.past] == ["b1b2"]
    assert len(placement.slots) == 7
    with pytest.raises(StageError) as raised:
        place(made, cluster(4, 2), num_ranks=4, num_engines=2, num_teachers=1, num_past=1, unit="GPUs")
    assert str(raised.value) == (
        "the cluster is too small: older versions of the policy (agent.past_versions) need 1 x 2 GPUs of their own, "
        "each engine on 1 node; free beside the run's other processes are GPUs on: a 0, b 1"
    )
    counts = {"num_ranks": 4, "num_engines": 2, "num_past": 2}
    assert place_on_fewest(made, 4, **counts)[1] == 2
    assert most_slots(made, **counts) == 12
    made.agent.past_versions.num_engines = 3
    assert process_counts(made, sft=False)["num_past"] == 0
    without = planned_cluster(made, 4).gpus
    made.agent.past_versions.every_steps = 5
    assert process_counts(made, sft=False)["num_past"] == 3
    assert process_counts(made, sft=True)["num_past"] == 0
    assert planned_cluster(made, 4).gpus == without + 3 * 2


def with_critic(*, sizes: ParallelConfig | None = None, **changes) -> Recipe:
    made = recipe(**changes)
    made.critic.trainer.parallel = sizes or ParallelConfig()
    return made


def of_critic(placement: Placement) -> str:
    return "".join(f"{slot.node.name}{slot.number}" for slot in placement.critics)


def test_a_critic_s_ranks_take_slots_that_nobody_else_has_and_come_after_the_teacher():
    made = with_critic(engine_tp=4)
    made.teacher.path, made.teacher.engine_tp = "teacher", 2
    placement = place(made, cluster(8, 8), num_ranks=8, num_engines=2, num_teachers=1, num_critics=3)
    assert shown(placement) == ("a" * 8, ["a0a1a2a3", "a4a5a6a7"])
    assert (of_teachers(placement), of_critic(placement)) == (["b0b1"], "b2b3b4")
    assert [placement.num_processes[slot] for slot in placement.slots] == [2] * 8 + [1] * 5
    # A node that others leave half empty, and the next one.
    beside = place(with_critic(colocated=False), cluster(4, 4), num_ranks=2, num_engines=1, num_critics=4)
    assert (shown(beside), of_critic(beside)) == (("aa", ["a2"]), "a3b0b1b2")
    assert len(set(beside.slots)) == 7
    # Without engines, as `train --trajectories` runs.
    assert of_critic(place(with_critic(), cluster(3), num_ranks=1, num_engines=0, num_critics=2)) == "a1a2"
    # A critic that the recipe sets up and the command does not start.
    assert place(with_critic(), cluster(3), num_ranks=1, num_engines=0).critics == ()


@pytest.mark.parametrize(
    ("policy", "critic", "expected"),
    [
        # Two slots of the first node are free, and three of the next ones: none of the critic's groups is cut.
        ({}, ParallelConfig(tensor=2), "a6a7b0b1"),
        ({}, ParallelConfig(tensor=4), "b0b1b2b3"),
        ({}, ParallelConfig(expert=4), "b0b1b2b3"),
        # The policy's groups are none of the critic's.
        ({"tensor": 2}, ParallelConfig(), "a6a7b0b1"),
        ({"tensor": 3}, ParallelConfig(), "a6a7b0b1"),
    ],
)
def test_a_critic_s_own_parallel_groups_stay_on_a_node(policy, critic, expected):
    placement = place(with_critic(sizes=critic, **policy), cluster(8, 5), num_ranks=6, num_engines=6, num_critics=4)
    assert of_critic(placement) == expected


def test_a_cluster_without_room_for_the_critic_is_refused_with_what_is_free():
    made = with_critic()
    made.teacher.path = "teacher"
    counts = {"num_ranks": 4, "num_engines": 4, "num_teachers": 1}
    with pytest.raises(StageError) as raised:
        place(made, cluster(4, 4), **counts, num_critics=4, unit="GPUs")
    assert str(raised.value) == (
        "the cluster is too small: the critic needs 4 GPUs of its own; free beside the run's other processes are GPUs "
        "on: a 0, b 3"
    )
    assert of_critic(place(made, cluster(4, 4), **counts, num_critics=3)) == "b1b2b3"


def test_a_planned_cluster_has_room_for_the_critic():
    made = with_critic()
    counts = {"num_ranks": 8, "num_engines": 8}
    assert place_on_fewest(made, 8, **counts)[1] == 1
    placement, count = place_on_fewest(made, 8, **counts, num_critics=9)
    assert (count, [slot.node.name for slot in placement.critics]) == (3, ["node1"] * 8 + ["node2"])
    assert most_slots(made, **counts, num_critics=9) == 25
    # The most that a plan tries is enough.
    assert place_on_fewest(made, 1, num_ranks=1, num_engines=1, num_critics=3)[1] == 4
