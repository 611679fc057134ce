"""What a planned GPU and a planned host hold at a time, against sums by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from slimrl.config.schema.precision import Precision
from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.config.schema.rollout import RolloutConfig
from slimrl.estimates.planner.engine import GIB, kv_bytes_per_token, plan_engine, static_fraction
from slimrl.estimates.planner.hardware import Hardware
from slimrl.estimates.planner.layout_plan import engine_problems
from slimrl.estimates.planner.memory import copies_per_node, engine_gpu_bytes, host_bytes_per_node, stage_memory
from slimrl.estimates.planner.parameters import ChunkParameters
from slimrl.estimates.planner.schedule import Batch
from slimrl.estimates.planner.shape import Shape
from slimrl.models.family import family_of
from slimrl.models.hf_config import published_config

HARDWARE = Hardware(reserve_gib=4)
RESERVE = 4 * GIB
PARAMETERS = 8 * 10**8
STAGE = (ChunkParameters(dense=(PARAMETERS,), experts=()),)
ENGINE_WEIGHTS, KV_CACHE, SLOTS = 3 * GIB, 50 * GIB, 2 * GIB


def shape_of(name: str) -> Shape:
    config = published_config(name)
    return Shape.of(family_of(config).megatron_config(config))


def made(*, colocated: bool, transport: TransportName) -> tuple[SimpleNamespace, Recipe]:
    """Facts of a model of one layer and its recipe, on 8 ranks."""
    recipe = Recipe()
    recipe.trainer.num_ranks = 8
    recipe.trainer.precision = Precision.bf16
    recipe.trainer.max_tokens_per_rank = 1000
    recipe.rollout.colocated, recipe.resync.transport = colocated, transport
    engine = SimpleNamespace(weights=ENGINE_WEIGHTS, kv_cache=KV_CACHE)
    return SimpleNamespace(shape=shape_of("Qwen3-8B"), slot_bytes=SLOTS, engine=engine), recipe


def memory_of(*, colocated: bool, transport: TransportName, pipeline: int = 1, stage: int = 0, micro_batches: int = 1):
    facts, recipe = made(colocated=colocated, transport=transport)
    recipe.trainer.parallel.pipeline = pipeline
    batch = Batch(tokens=8000, trajectory_tokens=1000, micro_batches=micro_batches)
    return stage_memory(facts, recipe, STAGE, [0], stage, batch, HARDWARE)


WEIGHTS, GRADIENTS, OPTIMIZER = 2 * PARAMETERS, 4 * PARAMETERS, 12 * PARAMETERS // 8

TOKENS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 1000, 4096, 32, 8, 128, 12288, 151936
"""Tokens of a micro-batch, and the sizes of Qwen3-8B."""
QUERIES, KEYS = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
NORMS, MLP = 4 * HIDDEN, 3 * INNER
ATTENTION = 2 * (QUERIES + KEYS) + KEYS + QUERIES
"""Queries and keys before and after their norm, values, the result."""
LAYER = TOKENS * (2 * (NORMS + ATTENTION + MLP) + 4 * HEADS)
"""Bytes that one layer keeps of a micro-batch: bf16, and a float32 per head."""
BACKWARD = TOKENS * 2 * max(ATTENTION, MLP)
FINAL_NORM = TOKENS * 2 * 2 * HIDDEN
LOGITS = TOKENS * VOCAB * (2 + 2 + 2 * 4)
"""bf16 logits and their gradient, and two float32 tensors of a chunk, here of all tokens."""
WORK = LAYER + BACKWARD + FINAL_NORM + LOGITS


def test_a_colocated_gpu_starts_with_the_trainer_alone_and_then_with_the_engine_alone():
    found = memory_of(colocated=True, transport=TransportName.ipc)
    assert found.phases["start"] == ENGINE_WEIGHTS + KV_CACHE + RESERVE
    assert found.phases["start"] > WEIGHTS + GRADIENTS + OPTIMIZER + RESERVE
    assert found.phases["train"] == WEIGHTS + GRADIENTS + OPTIMIZER + WORK + SLOTS + RESERVE
    assert found.phases["exchange"] == WEIGHTS + ENGINE_WEIGHTS + SLOTS + RESERVE
    assert found.phases["save"] == WEIGHTS + OPTIMIZER + ENGINE_WEIGHTS + SLOTS + RESERVE
    assert found.phases["rollout"] == ENGINE_WEIGHTS + KV_CACHE + SLOTS + RESERVE
    # No two of these are held at once.
    assert found.total == max(found.phases["train"], found.phases["rollout"])
    assert found.host == WEIGHTS + OPTIMIZER


def test_a_gpu_that_engines_reach_over_ipc_without_a_hand_over_holds_everything_at_once():
    found = memory_of(colocated=False, transport=TransportName.ipc)
    trainer, engine = WEIGHTS + GRADIENTS + OPTIMIZER + WORK, ENGINE_WEIGHTS + KV_CACHE
    assert found.phases == {"together": trainer + engine + SLOTS + RESERVE}
    assert found.host == 0
    facts, recipe = made(colocated=False, transport=TransportName.ipc)
    assert engine_gpu_bytes(facts, recipe, HARDWARE) is None


def test_engines_with_gpus_of_their_own_leave_the_trainers_to_it():
    found = memory_of(colocated=False, transport=TransportName.p2p)
    assert list(found.phases) == ["train"]
    assert found.total == WEIGHTS + GRADIENTS + OPTIMIZER + WORK + SLOTS + RESERVE
    assert found.parts["engine_weights"] == found.parts["kv_cache"] == 0
    facts, recipe = made(colocated=False, transport=TransportName.p2p)
    assert engine_gpu_bytes(facts, recipe, HARDWARE) == ENGINE_WEIGHTS + KV_CACHE + SLOTS + RESERVE


def test_the_first_of_two_stages_holds_two_micro_batches_and_the_last_one_the_logits():
    """Each stage's rank holds the optimizer states of a quarter of its parameters, since 4 ranks share them."""
    asked = {"colocated": False, "transport": TransportName.p2p, "pipeline": 2, "micro_batches": 4}
    first, last = (memory_of(**asked, stage=stage) for stage in (0, 1))
    state = WEIGHTS + GRADIENTS + 12 * PARAMETERS // 4
    assert first.phases == {"train": state + 2 * LAYER + BACKWARD + SLOTS + RESERVE}
    assert last.phases == {"train": state + WORK + SLOTS + RESERVE}
    assert (first.parts["logits"], last.parts["logits"]) == (0, LOGITS)


def test_the_host_of_a_node_keeps_what_its_ranks_give_away():
    _, recipe = made(colocated=True, transport=TransportName.ipc)
    memory = [SimpleNamespace(host=10, saving=700, copying=80), SimpleNamespace(host=30, saving=500, copying=90)]
    recipe.trainer.parallel.pipeline = 2
    # A node holds both stages of four ranks each, or one of them.
    assert recipe.trainer.num_ranks == 8
    assert host_bytes_per_node(recipe, memory, HARDWARE) == 8 * 30 + 2 * 700
    assert host_bytes_per_node(recipe, memory, Hardware(gpus_per_node=4)) == 4 * 30 + 700
    # Two checkpoints of a node and what is staged, and two of another node if there is one.
    recipe.checkpoint.in_memory_every_steps = 1
    assert copies_per_node(recipe, memory, HARDWARE) == 3 * (2 * 90)
    assert copies_per_node(recipe, memory, Hardware(gpus_per_node=4)) == 5 * 90
    assert host_bytes_per_node(recipe, memory, Hardware(gpus_per_node=4)) == 4 * 30 + 700 + 5 * 90
    recipe.checkpoint.in_memory_every_steps = 0
    recipe.trainer.num_ranks = 2
    assert host_bytes_per_node(recipe, memory, HARDWARE) == 2 * 30 + 2 * 700


CAPTURED = [n for n in range(4, 8193) if n % (4 if n <= 32 else 16 if n <= 256 else 32 if n <= 512 else 64) == 0]
CAPTURED = [n for n in CAPTURED if n != 36 and (n <= 1024 or n % 256 == 0) and (n <= 4096 or n % 512 == 0)]
"""Token counts of SGLang's graphs for prefilling up to 8192 tokens: steps of 4, 16, 32, 64, 256 and 512."""


@pytest.mark.parametrize(
    ("name", "settings", "graphs_mib"),
    [
        ("Qwen3-30B-A3B", {}, 2 * 512 + 8 * len(CAPTURED)),
        ("Qwen3-30B-A3B", {"max_running_requests": 64}, 2 * 64 + 8 * len(CAPTURED)),
        ("Qwen3-30B-A3B", {"max_total_tokens": 100}, 2 * 512 + 8 * (8 + 4)),
        ("Qwen3-30B-A3B", {"disable_prefill_cuda_graph": True}, 2 * 512),
        ("Qwen3-30B-A3B", {"disable_decode_cuda_graph": True}, 8 * len(CAPTURED)),
        ("Qwen3-30B-A3B", {"max_total_tokens": 100_000}, 2 * 512 + 8 * len(CAPTURED)),
        ("DeepSeek-V3", {}, 2 * 512 + 1536),
        ("DeepSeek-V3", {"disable_cuda_graph": True}, 0),
        ("DeepSeek-V3", {"cuda_graph_backend_prefill": "disabled"}, 2 * 512),
        ("DeepSeek-V3", {"cuda_graph_backend_decode": "disabled"}, 1536),
        ("DeepSeek-V3", {"cuda_graph_backend_prefill": "full", "disable_prefill_cuda_graph": True}, 2 * 512 + 1536),
        ("DeepSeek-V3", {"cuda_graph_backend_prefill": "full", "disable_cuda_graph": True}, 1536),
    ],
)
def test_sglangs_share_of_a_gpu_leaves_what_its_rule_reserves(name, settings, graphs_mib):
    recipe = Recipe(rollout=RolloutConfig(sglang=settings, engine_tp=8))
    # 512 MiB, 1.5 MiB for each of 8192 tokens, 1 GiB for 8 ranks, and graphs.
    reserved = 512 + 12288 + 1024 + graphs_mib
    assert static_fraction(recipe, shape_of(name), 80 * GIB) == pytest.approx(1 - reserved / 81920, abs=5e-4)


def test_a_colocated_engine_has_no_graphs_of_prefills_unless_a_backend_is_named():
    def fraction(colocated: bool, **settings: bool | str) -> float:
        recipe = Recipe(rollout=RolloutConfig(sglang=settings, engine_tp=8, colocated=colocated))
        return static_fraction(recipe, shape_of("DeepSeek-V3"), 80 * GIB)

    assert fraction(True) == fraction(False, disable_prefill_cuda_graph=True) > fraction(False)
    assert fraction(True, cuda_graph_backend_prefill="full") == fraction(False)
    assert fraction(True, cuda_graph_backend_prefill="disabled") == fraction(True)


@pytest.mark.parametrize(("most", "each"), [(None, 4.5), (300, 3)])
def test_sglang_reserves_memory_for_each_group_of_ranks_with_requests_of_its_own(most, each):
    batch = most or 512
    given = {"disable_prefill_cuda_graph": True, "max_running_requests": most}
    recipe = Recipe(rollout=RolloutConfig(sglang=given, engine_tp=8, engine_attention_dp=4))
    reserved = 512 + 12288 + 1024 + 2 * batch + 4 * batch * each
    assert static_fraction(recipe, shape_of("DeepSeek-V3"), 80 * GIB) == pytest.approx(1 - reserved / 81920, abs=5e-4)


@pytest.mark.parametrize(
    ("gib", "ranks", "settings", "reserved_mib"),
    [
        # 512 MiB, 1.5 MiB a token that is prefilled, 128 MiB a rank, and 2 MiB a sequence of the decoding graphs.
        (16, 1, {}, 512 + 2048 * 1.5 + 128 + 2 * 8),
        (24, 1, {}, 512 + 4096 * 1.5 + 128 + 2 * 48),
        (40, 2, {}, 512 + 4096 * 1.5 + 256 + 2 * 32),
        (40, 4, {}, 512 + 4096 * 1.5 + 512 + 2 * 160),
        # At least 10 GiB of a GPU of more than 60.
        (80, 1, {"chunked_prefill_size": 2048}, 10240),
        (60, 1, {"chunked_prefill_size": 2048}, 512 + 2048 * 1.5 + 128 + 2 * 256),
        (60, 1, {"chunked_prefill_size": 1024}, 512 + 2048 * 1.5 + 128 + 2 * 256),
        (80, 1, {}, 512 + 8192 * 1.5 + 128 + 2 * 256),
        (141, 8, {}, 512 + 8192 * 1.5 + 1024 + 2 * 512),
        (180, 1, {}, 512 + 16384 * 1.5 + 128 + 2 * 512),
    ],
)
def test_sglangs_rule_goes_by_the_size_of_the_gpu(gib, ranks, settings, reserved_mib):
    given = {**settings, "disable_prefill_cuda_graph": True}
    recipe = Recipe(rollout=RolloutConfig(sglang=given, engine_tp=ranks))
    found = static_fraction(recipe, shape_of("Qwen3-8B"), gib * GIB)
    assert found == pytest.approx(1 - reserved_mib / (gib * 1024), abs=6e-4)
    # The other way round it is far more than one part of 1000.
    assert static_fraction(recipe, shape_of("Qwen3-8B"), GIB) == 0.0


def test_an_engine_fills_what_its_weights_leave_with_keys_and_values():
    """A model of three parts, two of them sharded and one whole, is on 4 GPUs of 40 GiB, 4 GiB of each reserved."""
    shape = shape_of("Qwen3-8B")
    parts = [
        SimpleNamespace(spec=SimpleNamespace(name=name), nbytes=8 * GIB)
        for name in ("cut", "norm", "x.self_attn.k_proj.weight")
    ]
    weights = (2 + 8 + 2) * GIB
    recipe = Recipe()
    recipe.rollout.engine_tp, recipe.rollout.num_engines, recipe.rollout.max_trajectory_tokens = 4, 3, 1000

    def planned(**sglang):
        recipe.rollout.sglang = sglang
        return plan_engine(recipe, shape, parts, {"norm"}, gpu_bytes=40 * GIB, reserve_bytes=4 * GIB)

    each = 36 * 2 * 2 * 128 * 2
    for kind, width in (("auto", 2), ("fp8_e5m2", 1), ("bfloat16", 2)):
        found = planned(mem_fraction_static=0.75, kv_cache_dtype=kind)
        tokens = (27 * GIB - weights) // (each * width // 2)
        assert found.weights == weights
        assert (found.kv_bytes_per_token, found.kv_tokens) == (each * width // 2, tokens)
        assert found.kv_cache == tokens * found.kv_bytes_per_token
        assert found.trajectories == tokens // 1000 * 3
        assert found.mem_fraction_static == 0.75
    recipe.trainer.precision = Precision.fp32
    assert planned(mem_fraction_static=0.75).kv_bytes_per_token == 2 * each
    assert planned(mem_fraction_static=0.75, kv_cache_dtype="bfloat16").kv_bytes_per_token == each
    few = planned(mem_fraction_static=0.75, max_total_tokens=2999)
    assert (few.kv_tokens, few.kv_cache, few.trajectories) == (2999, 2999 * 2 * each, 6)
    assert planned(mem_fraction_static=0.75, max_total_tokens=10**9).kv_tokens < 10**6
    # Too small a share for the weights alone.
    none = planned(mem_fraction_static=0.25)
    assert (none.kv_cache, none.kv_tokens, none.trajectories) == (0, 0, 0)
    assert planned().mem_fraction_static == static_fraction(recipe, shape, 40 * GIB)


def test_an_engine_divides_its_memory_between_keys_and_values_and_states_of_linear_attention():
    """By SGLang's 0.9 bytes of states for one of the KV cache; 27 GiB of pool, no weights."""
    shape, recipe = shape_of("Qwen3-Next-80B-A3B"), Recipe()
    recipe.rollout.engine_tp, recipe.rollout.num_engines, recipe.rollout.max_trajectory_tokens = 2, 3, 1000
    # A float32 matrix for each of 32 value heads, and three tokens of 2 x 2048 + 4096 channels, in 36 layers.
    state = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) // 2

    def planned(**sglang):
        recipe.rollout.sglang = {"mem_fraction_static": 0.75, **sglang}
        return plan_engine(recipe, shape, (), (), gpu_bytes=36 * GIB, reserve_bytes=0)

    for given, share, reserved in (
        ({}, 0.9 / 1.9, 5),
        ({"disable_radix_cache": True}, 0.9 / 1.9, 1),
        ({"mamba_full_memory_ratio": 3}, 3 / 4, 5),
    ):
        found, states = planned(**given), round(27 * GIB * share)
        assert (found.state_bytes, found.sequences) == (state, states // (state * reserved))
        assert found.kv_tokens == (27 * GIB - states) // (12 * 2 * 256 * 2)
        assert found.kv_cache == pytest.approx(27 * GIB, rel=1e-6)
        assert found.trajectories == min(found.kv_tokens // 1000, found.sequences) * 3
    plain = plan_engine(recipe, shape_of("Qwen3-8B"), (), (), gpu_bytes=36 * GIB, reserve_bytes=0)
    assert (plain.state_bytes, plain.sequences) == (0, None)


def test_groups_of_ranks_share_an_engines_latent_cache_and_pay_for_it_with_copies_of_attention():
    recipe, shape = Recipe(), shape_of("DeepSeek-V3")
    recipe.rollout.engine_tp, recipe.rollout.num_engines, recipe.rollout.max_trajectory_tokens = 8, 2, 1000
    sizes = {"model.layers.9.mlp.experts.3.up_proj.weight": 160, "model.layers.9.self_attn.o_proj.weight": 16,
             "model.embed_tokens.weight": 8, "lm_head.weight": 8, "norm": 1}  # fmt: skip
    parts = [SimpleNamespace(spec=SimpleNamespace(name=name), nbytes=size * GIB) for name, size in sizes.items()]
    each = 61 * (512 + 64) * 2
    for groups in (1, 2, 8):
        recipe.rollout.engine_attention_dp = groups
        recipe.rollout.sglang = {"mem_fraction_static": 0.8}
        found = plan_engine(recipe, shape, parts, {"norm"}, gpu_bytes=80 * GIB, reserve_bytes=5 * GIB)
        assert found.weights == (20 + (16 + 8) // (8 // groups) + 1 + 1) * GIB
        assert found.expert_weights == 20 * GIB
        in_group = (60 * GIB - found.weights) // each
        assert (found.kv_bytes_per_token, found.kv_tokens) == (each, groups * in_group)
        assert found.kv_cache == in_group * each
        assert found.trajectories == 2 * groups * (in_group // 1000)
        recipe.rollout.sglang["max_total_tokens"] = 2999
        few = plan_engine(recipe, shape, parts, {"norm"}, gpu_bytes=80 * GIB, reserve_bytes=5 * GIB)
        assert (few.kv_tokens, few.kv_cache, few.trajectories) == (2999 * groups, 2999 * each, 2 * groups * 2)


def test_an_engine_of_more_ranks_than_heads_holds_copies_of_keys_and_values_alone():
    shape = replace(shape_of("Qwen3-8B"), kv_heads=2)
    recipe = Recipe()
    recipe.rollout.engine_tp, recipe.rollout.max_trajectory_tokens = 8, 1000
    names = ("x.self_attn.q_proj.weight", "x.self_attn.k_proj.weight", "x.self_attn.v_proj.weight")
    parts = [SimpleNamespace(spec=SimpleNamespace(name=name), nbytes=800) for name in names]

    def weights(of):
        return plan_engine(recipe, of, parts, (), gpu_bytes=80 * GIB, reserve_bytes=0).weights

    assert weights(shape) == 100 + 400 + 400
    assert weights(replace(shape, kv_latent=512)) == 300
    assert kv_bytes_per_token(shape, 8, 1) == 36 * 2 * 128


def test_engines_that_fill_a_node_are_not_told_to_grow():
    recipe = Recipe()
    recipe.rollout.max_trajectory_tokens = 1000
    engine = SimpleNamespace(trajectories=0, kv_tokens=400, weights=70 * GIB)
    short = "engines: 400 tokens of KV cache hold no trajectory of 1,000; raise "
    for ranks, instead in (
        (4, "rollout.engine_tp or rollout.sglang.mem_fraction_static"),
        (8, "rollout.sglang.mem_fraction_static. Spread each engine over several nodes"),
    ):
        recipe.rollout.engine_tp = ranks
        (problem,) = engine_problems(engine, recipe.rollout, HARDWARE, in_fp8=False)
        assert problem.startswith(short + instead)


def test_engines_whose_weights_fill_a_gpu_are_told_what_helps_them():
    recipe = Recipe()
    recipe.rollout.engine_tp = HARDWARE.gpus_per_node
    engine = SimpleNamespace(trajectories=0, kv_tokens=0, weights=79.9 * GIB)
    for in_fp8 in (False, True):
        (problem,) = engine_problems(engine, recipe.rollout, HARDWARE, in_fp8=in_fp8)
        assert problem.startswith("engines: weights of 79.9 GiB leave no room in a GPU's 80 GiB. Spread each engine")
        assert "more memory than 80 GiB (--gpu-memory-gib)" in problem
        assert "mem_fraction_static" not in problem
        assert ("slimrl-tools quantize" in problem) != in_fp8
    # An engine of fewer GPUs than its node has may grow there.
    recipe.rollout.engine_tp //= 2
    (problem,) = engine_problems(engine, recipe.rollout, HARDWARE, in_fp8=True)
    assert problem.endswith("80 GiB; raise rollout.engine_tp")
