"""Whether `resync.bucket_bytes` is large enough, against the plans of the transports themselves."""

import pytest

from slimrl.config.schema.recipe import Recipe
from slimrl.config.schema.resync import TransportName
from slimrl.data.model_weights import EngineModel, SourcePiece, TensorSpec
from slimrl.quantization.fp8 import BlockFp8
from slimrl.resync.bucket_size import most_fed_engines, too_few_bytes
from slimrl.resync.p2p.demand import sent_tensors
from slimrl.resync.p2p.engine_plan import EnginePlans, chains
from slimrl.resync.transform import Quantize

SPECS = [
    TensorSpec(name="wide.weight", shape=(4, 1000), dtype="bfloat16"),
    TensorSpec(name="tall.weight", shape=(1000, 8), dtype="float32"),
    TensorSpec(name="bias", shape=(5000,), dtype="float32"),
]


def recipe(*, engines: int = 3, tensor: int = 2, ranks: int = 8, bucket_bytes: int = 1000) -> Recipe:
    made = Recipe()
    made.resync.transport, made.resync.bucket_bytes = TransportName.p2p, bucket_bytes
    made.rollout.num_engines, made.rollout.engine_tp, made.trainer.num_ranks = engines, tensor, ranks
    return made


def plan(given: Recipe, transform: Quantize | None = None) -> EnginePlans:
    layout = {spec: (SourcePiece(region=tuple(slice(0, size) for size in spec.shape), holders=(0,)),) for spec in SPECS}
    tensors = sent_tensors(layout, transform)
    kept = {each.spec.name: [tuple((0, size) for size in each.spec.shape)] for each in tensors}
    models = {EngineModel.target: [kept] * given.rollout.engine_tp}
    return EnginePlans(
        tensors,
        [models] * given.rollout.num_engines,
        num_ranks=given.trainer.num_ranks,
        bucket_bytes=given.resync.bucket_bytes,
    )


def test_with_p2p_two_rows_for_each_engine_must_fit_and_the_plan_is_possible_with_the_size_that_is_named():
    assert too_few_bytes(SPECS, recipe(bucket_bytes=12000), None) == ""
    plan(recipe(bucket_bytes=12000)).of(0)
    assert too_few_bytes(SPECS, recipe(bucket_bytes=11999), None) == (
        "11999 bytes are too few: one row of wide.weight has 2000, and a trainer rank needs room for 2 of each engine "
        "to which it sends, of which there are up to 3. Use 12000 or more."
    )
    with pytest.raises(ValueError, match=r"one row of wide\.weight has 2000 bytes"):
        plan(recipe(bucket_bytes=11999)).of(0)


def test_rows_count_as_the_engines_get_them():
    transform = Quantize(BlockFp8(), ["wide.weight"])
    assert too_few_bytes(SPECS, recipe(bucket_bytes=6000), transform) == ""
    plan(recipe(bucket_bytes=6000), transform).of(0)
    assert "one row of wide.weight has 1000" in too_few_bytes(SPECS, recipe(bucket_bytes=5999), transform)


def test_engines_that_may_join_count_too():
    given = recipe(bucket_bytes=12000)
    given.rollout.max_engines = 4
    assert "of which there are up to 4. Use 16000 or more." in too_few_bytes(SPECS, given, None)


@pytest.mark.parametrize(("tensor", "ranks"), [(2, 8), (8, 8), (16, 8), (3, 7), (1, 1), (8, 256)])
def test_as_many_engines_are_fed_by_the_trainer_as_begin_chains(tensor, ranks):
    for engines in range(1, 40):
        models = {EngineModel.target: [{}] * tensor}
        most = max(chains([models] * count, ranks).count(None) for count in range(1, engines + 1))
        assert most_fed_engines(recipe(engines=engines, tensor=tensor, ranks=ranks)) == most


def test_other_transports_need_buckets_for_rows_alone():
    given = recipe(bucket_bytes=2000)
    given.resync.transport = TransportName.disk
    assert too_few_bytes(SPECS, given, None) == ""
    given.resync.bucket_bytes = 1999
    assert "Use 2000 or more." in too_few_bytes(SPECS, given, None)
