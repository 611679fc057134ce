"""Which rank holds what of a model, under which names, and how it comes together again."""

import re
from argparse import Namespace
from collections import deque
from types import MappingProxyType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from megatron.core import parallel_state as mpu
from slimrl_tools.torch_dist import TorchDistCheckpoint
from slimrl_tools.toy.toy_configs import ToySize, toy_config
from torch.distributed.checkpoint.metadata import MetadataIndex

from slimrl.checkpoints.digests import Span
from slimrl.checkpoints.file_groups import group_by_bytes
from slimrl.checkpoints.safetensors_file import spec_bytes
from slimrl.checkpoints.torch_dist.chunks import Chunk, ShardSchema
from slimrl.checkpoints.torch_dist.files import plan_distcp_files, write_distcp_file
from slimrl.checkpoints.torch_dist.metadata import COMMON_KEY, content_metadata, write_metadata
from slimrl.checkpoints.torch_dist.safe_pickle import read_metadata
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.data.model_weights import SourceLayout, SourcePiece, TensorSpec
from slimrl.models.family import family_of
from slimrl.models.weight_map import Entry, HfTensor, Rule, Shard, WeightMap
from slimrl.toys.random_weights import random_tensors
from slimrl.trainer import weight_source, weights
from slimrl.trainer.checkpointing.shard_schema import _check_complete, _place, shard_schema
from slimrl.trainer.checkpointing.untrained_mtp import UntrainedMtpTensors
from slimrl.trainer.checkpointing.writing import _written_by
from slimrl.trainer.layout.fake_world import fake_world
from slimrl.trainer.layout.source_layout import source_layout
from slimrl.trainer.weight_source import MegatronWeightSource

SIZE = ToySize(layers=4, hidden=16, heads=2, kv_heads=2, head_dim=8, experts=4, moe_intermediate=8)
VOCAB = 13
"""An odd number, which two ranks pad to 14."""


def config_of(family: str, **more) -> dict:
    size = ToySize(**{**vars(SIZE), "mtp_layers": 1 if family in ("glm4_moe", "deepseek_v3") else 0})
    return toy_config(family, size) | {"vocab_size": VOCAB, **more}


def trainer(num_ranks: int, megatron: dict | None = None, **parallel) -> TrainerConfig:
    return TrainerConfig(
        num_ranks=num_ranks, parallel=ParallelConfig(**parallel), precision=Precision.bf16, max_tokens_per_rank=1,
        optimizer=OptimizerConfig(lr=0.0), megatron=megatron or {},
    )  # fmt: skip


def held(config: dict, given: TrainerConfig) -> dict[str, list[tuple]]:
    """Tensor -> first and last row of each of its pieces, where it is cut by rows, and their ranks."""
    return {
        spec.name: [(piece.region[0].start, piece.region[0].stop, piece.holders) for piece in pieces]
        for spec, pieces in source_layout(config, given).items()
    }


LAYER = "model.layers.{}."
NORM, QUERY, ROUTER = LAYER + "input_layernorm.weight", LAYER + "self_attn.q_proj.weight", LAYER + "mlp.gate.weight"
EXPERT = LAYER + "mlp.experts.{}.up_proj.weight"


def test_ranks_are_numbered_tensor_context_data_pipeline_and_experts_have_an_order_of_their_own():
    """Eight ranks: two stages of four, in each of which neighbours are tensor-parallel."""
    config = config_of("qwen3_moe")
    found = held(config, trainer(8, tensor=2, sequence=True, pipeline=2, expert=4))
    assert found["model.embed_tokens.weight"] == [(0, 7, (0, 2)), (7, VOCAB, (1, 3))]
    assert found["lm_head.weight"] == [(0, 7, (4, 6)), (7, VOCAB, (5, 7))]
    assert found["model.norm.weight"] == [(0, 16, (4, 5, 6, 7))]
    for layer, first in ((0, 0), (1, 0), (2, 4), (3, 4)):
        assert found[NORM.format(layer)] == [(0, 16, tuple(range(first, first + 4)))]
        assert found[ROUTER.format(layer)] == [(0, 4, tuple(range(first, first + 4)))]
        assert found[QUERY.format(layer)] == [(0, 8, (first, first + 2)), (8, 16, (first + 1, first + 3))]
        for expert in range(4):
            assert found[EXPERT.format(layer, expert)] == [(0, 8, (first + expert,))]
    # Experts that are cut: neighbours have the parts, the next pair the next two experts.
    cut = held(config, trainer(8, tensor=2, sequence=True, expert=2, expert_tensor=2))
    for expert, first in ((0, 0), (1, 0), (2, 2), (3, 2)):
        assert cut[EXPERT.format(0, expert)] == [(0, 4, (first, first + 4)), (4, 8, (first + 1, first + 5))]
    # Two context-parallel ranks have equal weights, and an interleaved stage every other layer.
    context = held(config, trainer(8, tensor=2, sequence=True, context=2, pipeline=2, virtual_pipeline=2))
    assert context[QUERY.format(2)] == [(0, 8, (0, 2)), (8, 16, (1, 3))]
    assert context[QUERY.format(1)] == [(0, 8, (4, 6)), (8, 16, (5, 7))]
    assert context[EXPERT.format(1, 3)] == [(0, 8, (4, 5, 6, 7))]


def test_tied_embeddings_are_on_both_ends_and_specs_say_their_precision():
    config = config_of("qwen3", tie_word_embeddings=True)
    found = held(config, trainer(4, pipeline=4))
    assert found["model.embed_tokens.weight"] == [(0, VOCAB, (0, 3))]
    given = trainer(1)
    specs = list(source_layout(config, given))
    weight_map = family_of(config).weight_map(config)
    assert specs == weight_map.specs("bfloat16")
    given.precision = Precision.fp32
    assert list(source_layout(config, given)) == weight_map.specs("float32")


def test_a_shard_of_padding_alone_is_no_piece():
    rows = held(
        config_of("llama") | {"vocab_size": 5, "num_attention_heads": 4, "num_key_value_heads": 4}, trainer(4, tensor=4)
    )
    assert rows["model.embed_tokens.weight"] == [(0, 2, (0,)), (2, 4, (1,)), (4, 5, (2,))]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (trainer(6, tensor=4), "trainer.num_ranks: 6 do not divide into the layout"),
        (trainer(6, expert=4), "trainer.num_ranks: 6 do not divide into the layout"),
        (trainer(6, tensor=2, pipeline=2), "trainer.num_ranks: 6 do not divide into the layout"),
        (trainer(3, pipeline=3), "trainer.parallel.pipeline: "),
    ],
)
def test_a_model_that_does_not_divide_into_a_layout_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        source_layout(config_of("qwen3_moe"), given)


def test_uneven_stages_have_the_layers_that_the_recipe_gives_them():
    first = held(config_of("qwen3_moe"), trainer(2, {"num_layers_in_first_pipeline_stage": 1}, pipeline=2))
    assert [first[NORM.format(layer)][0][2] for layer in range(4)] == [(0,), (1,), (1,), (1,)]
    drawn = held(config_of("qwen3_moe"), trainer(2, {"pipeline_model_parallel_layout": "Ettt|tL"}, pipeline=2))
    assert [drawn[NORM.format(layer)][0][2] for layer in range(4)] == [(0,), (0,), (0,), (1,)]


def test_global_names_count_layers_of_the_model_and_experts_of_all_ranks(monkeypatch):
    monkeypatch.setattr(mpu, "get_expert_model_parallel_rank", lambda: 2)
    monkeypatch.setattr(mpu, "get_expert_model_parallel_world_size", lambda: 4)
    layers = {"decoder.layers.0": 5}
    for name, expected in (
        ("decoder.layers.0.mlp.router.weight", "decoder.layers.5.mlp.router.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            "decoder.layers.5.mlp.experts.local_experts.5.linear_fc1.weight",
        ),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight1", "decoder.layers.5.mlp.experts.linear_fc2.weight5"),
        ("mtp.layers.0.eh_proj.weight", "mtp.layers.0.eh_proj.weight"),
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ):
        assert weights._global_name(name, layers, 8) == expected


def test_a_shard_s_place_is_that_in_the_group_which_cuts_it(monkeypatch):
    for name, value in (
        ("get_tensor_model_parallel_rank", 3),
        ("get_tensor_model_parallel_world_size", 4),
        ("get_expert_tensor_parallel_rank", 1),
        ("get_expert_tensor_parallel_world_size", 2),
    ):
        monkeypatch.setattr(mpu, name, lambda value=value: value)

    def place(shard):
        rule = Rule(megatron=("a",), hf=(HfTensor(name="a", shape=(8,)),), shard=shard)
        return weights.shard_place(Entry(rule=rule))

    assert place(None) == (0, 1)
    assert place(Shard(dim=0)) == (3, 4)
    assert place(Shard(dim=0, group="expert_tensor")) == (1, 2)


class Folder:
    """A checkpoint in memory."""

    path = "somewhere"
    left_out = MappingProxyType({})

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.specs = {
            name: TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, name, slices):
        return self.tensors[name][slices]


@pytest.mark.parametrize("mtp_layers", [0, 1])
@pytest.mark.parametrize("has_mtp", [False, True])
def test_layers_for_multi_token_prediction_are_loaded_where_the_model_has_them(monkeypatch, mtp_layers, has_mtp):
    live, asked = torch.zeros(2, 3), []
    model = SimpleNamespace(config=SimpleNamespace(mtp_num_layers=mtp_layers), vocab_size=14)
    weight_map = WeightMap([Rule(megatron=("a",), hf=(HfTensor(name="a", shape=(2, 3)),))])
    family = SimpleNamespace(weight_map=lambda *given, mtp: asked.append((*given, mtp)) or weight_map)
    monkeypatch.setattr(weights, "unwrap", lambda chunk: model)
    monkeypatch.setattr(weights, "check_tensors", lambda folder, *about: has_mtp)
    monkeypatch.setattr(weights, "local_weights", lambda chunks, weight_map: [(0, live)])
    stored = {"a": torch.ones(2, 3)}
    opened = []
    monkeypatch.setattr(weights, "open_hf_checkpoint", lambda path, dtype: opened.append(dtype) or Folder(stored))
    if mtp_layers and not has_mtp:
        with pytest.raises(ValueError, match="no tensors of the layers for multi-token prediction"):
            weights.load_hf_weights([None], "somewhere", family, {}, "bfloat16")
        return
    weights.load_hf_weights([None], "somewhere", family, {}, "bfloat16")
    assert live.eq(1).all()
    assert opened == ["bfloat16"]
    assert asked == [({}, 14, bool(mtp_layers))]
    monkeypatch.setattr(weights, "local_weights", lambda chunks, weight_map: [(0, torch.zeros(3, 3))])
    with pytest.raises(ValueError, match=r"a: somewhere gives \[2, 3\], the model has \[3, 3\]"):
        weights.load_hf_weights([None], "somewhere", family, {})


@pytest.mark.parametrize(
    ("family", "settings", "mtp"),
    [("qwen3_moe", {"tensor": 2}, False), ("glm4_moe", {"tensor": 2, "expert_tensor": 2}, True), ("llama", {}, False)],
)
def test_a_folder_written_by_the_schema_reads_back_as_the_same_tensors(tmp_path, family, settings, mtp):
    config = config_of(family)
    schema = shard_schema(config, **settings, mtp=mtp)
    source = dict(random_tensors(config, family_of(config).weight_map(config, mtp=mtp), 1.0, 0))
    dtypes = [torch.float32] * len(schema.weight_map.entries)
    files = {}
    for name, chunks in plan_distcp_files(schema, dtypes, 20_000).items():
        calls = Mock()
        write_distcp_file(tmp_path / name, chunks, schema.weight_map.entries, dtypes, Folder(source), calls)
        files[name] = [(chunk, call.args[1]) for chunk, call in zip(chunks, calls.call_args_list, strict=True)]
    assert len(files) > 1
    write_metadata(tmp_path, schema, dtypes, files)
    found = TorchDistCheckpoint(tmp_path, config)
    names = {tensor.name for entry in schema.weight_map.entries for tensor in entry.hf}
    assert found.specs.keys() == names
    for name in names:
        assert found.specs[name].dtype == "float32"
        assert torch.equal(found.read(name, tuple(slice(0, size) for size in source[name].shape)), source[name]), name
    assert any(name.startswith("model.layers.4.") for name in names) == mtp
    stored = read_metadata(tmp_path)
    assert set(schema.objects) <= stored.state_dict_metadata.keys()
    # Layers and experts have keys of their own; without this they share them, and so do layers that are alike.
    alike = shard_schema(config, singleton_local_shards=False)
    assert len({chunk.key for chunk in alike.chunks}) < len({chunk.key for chunk in schema.chunks})
    (objects,) = {stored.storage_data[MetadataIndex(key)].relative_path for key in (*schema.objects, COMMON_KEY)}
    for damage in (
        lambda: (tmp_path / objects).write_bytes(b"x"),
        lambda: (tmp_path / objects).write_bytes(b""),
        (tmp_path / objects).unlink,
    ):
        damage()
        with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: not a checkpoint of megatron-core: "):
            TorchDistCheckpoint(tmp_path, config)
    write_metadata(tmp_path, schema, dtypes, files)
    TorchDistCheckpoint(tmp_path, config)
    # Older versions of megatron-core stored it in a file of its own, with Megatron-LM's arguments.
    common = {"content_metadata": {"singleton_local_shards": False}, "args": Namespace(num_layers=4)}
    torch.save(common, tmp_path / "common.pt")
    assert content_metadata(tmp_path, stored) == {"singleton_local_shards": False}
    (tmp_path / "common.pt").unlink()
    assert content_metadata(tmp_path, stored)["singleton_local_shards"]
    (tmp_path / "metadata.json").unlink()
    with pytest.raises(ValueError, match="not a checkpoint of megatron-core"):
        TorchDistCheckpoint(tmp_path, config)


def test_a_folder_that_lacks_a_chunk_is_not_made_whole(tmp_path):
    chunk = Chunk(entry=0, shard=0, num_shards=1, slices=(slice(0, 2),), key="a", global_shape=(2,), offset=(0,))
    schema = ShardSchema(weight_map=WeightMap([]), chunks=(chunk,), objects=())
    with pytest.raises(AssertionError, match="1 chunks were not written"):
        write_metadata(tmp_path, schema, [torch.float32], {"__0_0.distcp": []})
    written = chunk, Span(name="a", start=0, length=1, digest="")
    with pytest.raises(KeyError):
        write_metadata(tmp_path, schema, [torch.float32], {"__0_0.distcp": [written, written]})


def test_chunks_must_cover_every_weight_exactly_once():
    rules = [Rule(megatron=(name,), hf=(HfTensor(name=name, shape=(4,)),)) for name in "ab"]

    def chunk(entry, start, stop):
        return Chunk(
            entry=entry, shard=0, num_shards=1, slices=(slice(start, stop),), key="ab"[entry], global_shape=(4,),
            offset=(start,),
        )  # fmt: skip

    whole = [chunk(0, 0, 2), chunk(0, 2, 4), chunk(1, 0, 4)]
    _check_complete(whole, WeightMap(rules))
    with pytest.raises(AssertionError, match="1 weights are not stored, the first is b"):
        _check_complete(whole[:2], WeightMap(rules))
    with pytest.raises(AssertionError, match="a is not covered exactly once"):
        _check_complete(whole[1:], WeightMap(rules))


def test_a_view_lies_where_it_begins_and_ends():
    whole = torch.zeros(6, 4)
    assert _place(whole[2:5], whole) == (slice(2, 5), slice(0, 4))
    assert _place(whole[2:5, 1:3], whole) == (slice(2, 5), slice(1, 3))
    for other in (whole.clone(), whole.t()):
        with pytest.raises(AssertionError):
            _place(other, whole)


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (ParallelConfig(tensor=2, context=3), 6),
        (ParallelConfig(tensor=2, expert=3, expert_tensor=2, pipeline=2), 12),
        (ParallelConfig(tensor=4, expert=2), 4),
    ],
)
def test_the_smallest_world_has_a_rank_for_every_part(parallel, ranks):
    assert parallel.smallest_world() == ranks


def test_a_fake_world_leaves_nothing_behind():
    state, device = torch.get_rng_state(), torch.cuda.current_device
    with fake_world(ParallelConfig(tensor=2, pipeline=2, sequence=True), rank=3, world_size=4):
        assert (mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()) == (1, 1)
        assert torch.cuda.current_device().type == torch.empty(1).device.type == "meta"
        torch.rand(3, device="cpu")
    assert not torch.distributed.is_initialized()
    assert not mpu.model_parallel_is_initialized()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.cuda.current_device is device
    with (
        pytest.raises(ValueError, match="6 ranks do not divide into the layout"),
        fake_world(ParallelConfig(tensor=4), rank=0, world_size=6),
    ):
        pass
    assert not torch.distributed.is_initialized()


def test_an_export_carries_over_the_layers_that_are_not_trained_and_copies_of_those_that_are():
    config = config_of("glm4_moe")
    family = family_of(config)
    everything = dict(random_tensors(config, family.weight_map(config, mtp=True), 1.0, 0))
    trained = family.weight_map(config).specs("bfloat16")
    now = {spec.name: everything[spec.name] + 1 for spec in trained}
    carried = UntrainedMtpTensors(Folder(everything), config, trained, "bfloat16")
    specs, found = carried.specs(), dict(carried.tensors((spec.name, now[spec.name]) for spec in trained))
    assert [spec.name for spec in specs] == list(found)
    assert found.keys() == everything.keys()
    copies = {"model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
              "model.layers.4.shared_head.head.weight": "lm_head.weight"}  # fmt: skip
    for name, tensor in found.items():
        original = copies.get(name, name)
        assert torch.equal(tensor, now[original] if original in now else everything[name]), name
    for spec in specs:
        assert spec.shape == tuple(found[spec.name].shape)
        if "e_score_correction_bias" not in spec.name:
            assert spec.dtype == "bfloat16"
    places = [spec.name for spec in specs]
    for copy, original in copies.items():
        assert places.index(copy) == places.index(original) + 1
    # A checkpoint without these layers gets none.
    alone = UntrainedMtpTensors(Folder({name: everything[name] for name in now}), config, trained, "bfloat16")
    assert [spec.name for spec in alone.specs()] == [spec.name for spec in trained]
    with pytest.raises(AssertionError, match="only rank 0 has the tensors"):
        list(alone.tensors([("a", None)]))


def test_every_file_of_a_checkpoint_has_one_rank_that_wrote_it(tmp_path):
    (tmp_path / "rng").mkdir()
    for name in ("common.pt", ".metadata", "__0_1.distcp", "__0_0.distcp", "__12_0.distcp", "__1_0.distcp",
                 "rng/00001.pt", "rng/00000.pt", "rng/00012.pt", "x__1_0.distcp"):  # fmt: skip
        (tmp_path / name).touch()
    assert _written_by(tmp_path, 0) == [
        ".metadata", "__0_0.distcp", "__0_1.distcp", "common.pt", "rng/00000.pt", "x__1_0.distcp",
    ]  # fmt: skip
    assert _written_by(tmp_path, 1) == ["__1_0.distcp", "rng/00001.pt"]
    assert _written_by(tmp_path, 12) == ["__12_0.distcp", "rng/00012.pt"]
    assert _written_by(tmp_path, 2) == []


def source_tensor(name: str, rows: int, pieces: list[tuple[int, int, tuple[int, ...]]], dtype: str) -> SourceLayout:
    return {
        TensorSpec(name=name, shape=(rows, 2), dtype=dtype): tuple(
            SourcePiece(region=(slice(start, stop), slice(0, 2)), holders=holders) for start, stop, holders in pieces
        )
    }


def test_tensors_are_gathered_in_windows_of_bounded_size():
    sizes = zip("abcdef", (5, 7, 1, 30, 2, 10), strict=True)
    specs = [TensorSpec(name=name, shape=(rows, 2), dtype="float32") for name, rows in sizes]
    windows = group_by_bytes(specs, spec_bytes, 96)
    assert [[spec.name for spec in window] for window in windows] == [["a", "b"], ["c"], ["d"], ["e", "f"]]


class Rank(MegatronWeightSource):
    """One that holds given pieces."""

    def __init__(self, rank, layout, pieces):
        self._rank, self._layout, self._device = rank, layout, torch.device("cpu")
        self._windows, self.held = group_by_bytes(layout, spec_bytes, 40), pieces

    def groups(self, name):
        return self.held[name][None]


def test_the_first_rank_puts_together_what_the_others_hold(monkeypatch):
    """Pieces of odd sizes, so that some lie off the boundaries of their elements."""
    layout = {
        **source_tensor("alone", 3, [(0, 3, (0, 1, 2))], "float32"),
        **source_tensor("narrow", 3, [(0, 1, (0,)), (1, 3, (1, 2))], "bfloat16"),
        **source_tensor("bytes", 3, [(0, 1, (2,)), (1, 3, (1,))], "uint8"),
        # The second piece is that of rank 2, the first that of rank 1, which has two of them here.
        **source_tensor("wide", 4, [(2, 4, (1,)), (1, 2, (1, 2)), (0, 1, (0,))], "float32"),
    }
    whole = {
        spec.name: torch.arange(2 * spec.shape[0]).reshape(spec.shape).float() + 10 * number
        for number, spec in enumerate(layout)
    }
    sent = {1: deque(), 2: deque()}
    places = {
        1: {"narrow": (1, 3), "bytes": (1, 3), "wide": (2, 4)},
        2: {"narrow": (1, 3), "bytes": (0, 1), "wide": (1, 2)},
    }
    monkeypatch.setattr(weight_source.dist, "P2POp", lambda operation, tensor, peer: (operation, tensor, peer))

    def exchange(operations):
        for operation, tensor, peer in operations:
            if operation is weight_source.dist.isend:
                assert peer == 0
                sent[sender].append(tensor)
            else:
                tensor.copy_(sent[peer].popleft())

    monkeypatch.setattr(weight_source, "_exchange", exchange)
    for sender in (1, 2):
        rows = {name: whole[name][start:stop] for name, (start, stop) in places[sender].items()}
        assert all(tensor is None for _, tensor in Rank(sender, layout, {"alone": whole["alone"], **rows}).tensors())
    own = {"alone": whole["alone"], "narrow": whole["narrow"][:1], "wide": whole["wide"][:1]}
    found = list(Rank(0, layout, own).tensors())
    assert [name for name, _ in found] == ["alone", "narrow", "bytes", "wide"]
    for (name, tensor), spec in zip(found, layout, strict=True):
        assert tensor.dtype == getattr(torch, spec.dtype)
        assert torch.equal(tensor.float(), whole[name]), name
    assert not sent[1]
    assert not sent[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_with_a_value_that_is_not_finite_are_named_wherever_it_stands(monkeypatch, dtype, value):
    held = {name: torch.full((3, 1000), torch.finfo(dtype).max, dtype=dtype) for name in ("first", "good", "last")}
    held["first"][0, 0] = held["last"][2, 999] = value
    held["negative"] = torch.full((5,), torch.finfo(dtype).min, dtype=dtype)
    held |= {"counter": torch.tensor(3), "empty": torch.zeros(0, dtype=dtype)}
    monkeypatch.setattr(weights, "_global_tensors", lambda chunks, heads: held.items())
    assert weights.names_not_finite([]) == ["first", "last"]
    monkeypatch.setattr(weights, "_global_tensors", lambda chunks, heads: ())
    assert weights.names_not_finite([]) == []
