"""Engines in block FP8 hold whole tiles, or the recipe is refused."""

import pytest

from slimrl.config.check import check_recipe
from slimrl.config.fp8_tiles import trainer_tile_warnings
from slimrl.config.load import load_recipe
from slimrl.models.hf_config import BLOCK_FP8, published_config

GIVEN = [
    "steps=3", "run.name=demo", "model.path=model", "data.train=train.jsonl", "reward.function=a.b:c",
    "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
    "rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=64",
    "rollout.eval_sampling.max_new_tokens=64",
]  # fmt: skip


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """(key, message) of what is wrong with engines of so many ranks and parts, for a published model in block FP8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("")

    def of(model: str | dict, tensor: int, expert: int = 1, groups: int = 1, **quantization) -> list[tuple[str, str]]:
        config = published_config(model) if isinstance(model, str) else model
        config = {**config, "quantization_config": {**BLOCK_FP8, **quantization}}
        sizes = [f"rollout.engine_{name}={n}" for name, n in (("tp", tensor), ("ep", expert), ("attention_dp", groups))]
        recipe = load_recipe("recipe.yaml", GIVEN + sizes, command="rollout").recipe
        return [(problem.key, problem.message) for problem in check_recipe(recipe, config, "rollout")]

    return of


def test_experts_cut_within_tiles_are_refused_with_the_parts_that_are_whole(refused):
    assert refused("Qwen3-30B-A3B", 8, 1) == [
        (
            "rollout.engine_ep",
            "1: the 768 columns of an expert on 8 ranks are 96 each, no whole number of FP8 tiles of 128. Use 4 or 8.",
        )
    ]
    assert refused("Qwen3-30B-A3B", 8, 4) == refused("Qwen3-30B-A3B", 2, 1) == []


def test_groups_with_the_whole_of_attention_cut_it_less(refused):
    """Sixteen heads of 64 rows with eight of keys, on eight ranks half a tile of keys each."""
    config = {**published_config("Qwen3-30B-A3B"), "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    text = "the 512 rows of the keys on 8 ranks are 64 each, no whole number of FP8 tiles of 128."
    assert refused(config, 8, 8) == [("rollout.engine_tp", f"8: {text}")]
    assert refused(config, 8, 8, 2) == refused(config, 8, 8, 8) == []
    # The experts, 768 columns, are cut as without groups.
    ((key, _),) = refused(config, 8, 1, 8)
    assert key == "rollout.engine_ep"


def test_plain_weights_may_be_cut_anywhere(refused):
    assert refused("Qwen3-30B-A3B", 8, 1, weight_block_size=None) == []


def test_experts_and_shared_experts_are_refused_each_with_what_is_whole(refused):
    # 1408 columns of an expert are 11 tiles, 2816 of both shared ones 22, 11264 of the dense layer 88.
    text = "each, no whole number of FP8 tiles of 128."
    assert refused("Moonlight-16B-A3B", 4, 1) == [
        ("rollout.engine_ep", f"1: the 1408 columns of an expert on 4 ranks are 352 {text} Use 4."),
        ("rollout.engine_tp", f"4: the 2816 columns of the shared experts on 4 ranks are 704 {text} Use 1."),
    ]
    assert refused("Moonlight-16B-A3B", 2, 2) == []


def test_a_dense_layer_is_refused_with_the_largest_smaller_engine_that_heads_allow(refused):
    # 9728 columns are 76 tiles; 7 and 6 ranks do not divide the heads, 5 neither.
    ((key, message),) = refused("Qwen3-4B", 8)
    assert key == "rollout.engine_tp"
    assert message.startswith("8: the 9728 columns of a dense layer on 8 ranks are 1216 each")
    assert message.endswith("Use 4.")


def test_heads_of_64_in_twos_are_whole_and_single_ones_are_not(refused):
    assert refused("Qwen2.5-0.5B", 1) == []
    messages = [message for _, message in refused("Qwen2.5-0.5B", 2)]
    assert any(message.startswith("2: the 128 rows of the keys on 2 ranks are 64 each") for message in messages)


@pytest.mark.parametrize(
    ("name", "plain"), [("Qwen3-Next-80B-A3B", ["in_proj_qkvz"]), ("Qwen3.5-35B-A3B", ["in_proj_qkv", "in_proj_z"])]
)
def test_keys_and_values_of_linear_attention_are_whole_tiles_each(refused, name, plain):
    published = published_config(name)
    assert refused(published, 4) == []
    # 384 rows are 3 tiles, 3200 rows are 25.
    for kind, size, rows, each in (("key", {"num_key_heads": 4}, 384, 96), ("value", {}, 3200, 800)):
        sizes = {"key_head_dim": 96} if kind == "key" else {"value_head_dim": 100}
        narrow = {**published, **{f"linear_{name}": value for name, value in (sizes | size).items()}}
        assert refused(narrow, 1) == []
        assert refused(narrow, 4) == [
            (
                "rollout.engine_tp",
                f"4: the {rows} rows of linear attention's {kind}s on 4 ranks are {each} each, no whole number of FP8 "
                "tiles of 128. Use 1.",
            )
        ]
        assert refused(narrow, 4, modules_to_not_convert=[f"linear_attn.{module}" for module in plain]) == []


def test_ranks_that_hold_copies_of_a_head_hold_all_of_it(refused):
    assert refused("Qwen3-30B-A3B", 8, 8) == []


def test_modules_that_keep_their_precision_may_be_cut_anywhere(refused):
    layers = published_config("Qwen3-30B-A3B")["num_hidden_layers"]
    assert refused("Qwen3-30B-A3B", 8, 1, modules_to_not_convert=["mlp.experts"]) == []
    all_but_one = [f"model.layers.{layer}.mlp.experts" for layer in range(layers - 1)]
    assert len(refused("Qwen3-30B-A3B", 8, 1, modules_to_not_convert=all_but_one)) == 1
    last = f"model.layers.{layers - 1}.mlp"
    assert refused("Qwen3-30B-A3B", 8, 1, modules_to_not_convert=[*all_but_one, last]) == []


LATENT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 1024,
}


def test_heads_of_latent_attention_are_of_their_two_parts_and_cut_only_where_ranks_share_them(refused):
    # 4 heads of 96 + 64 on 2 ranks are 320 rows each, of 96 + 128 they are 448.
    text = "each, no whole number of FP8 tiles of 128. Use 1."
    queries = ("rollout.engine_tp", f"2: the 640 rows of the queries on 2 ranks are 320 {text}")
    assert refused(LATENT, 2) == [
        queries,
        ("rollout.engine_tp", f"2: the 896 rows of keys and values on 2 ranks are 448 {text}"),
    ]
    assert refused(LATENT, 1) == []
    assert refused(LATENT, 2, modules_to_not_convert=["self_attn.q_b_proj", "self_attn.kv_b_proj"]) == []
    direct = {**LATENT, "q_lora_rank": None}
    assert refused(direct, 2, modules_to_not_convert=["self_attn.q_proj", "self_attn.kv_b_proj"]) == []
    assert refused({**LATENT, "qk_nope_head_dim": 64, "v_head_dim": 192}, 2) == []
    # 4 x 96 columns of the output are 192 on each of 2 ranks.
    narrow = {**LATENT, "qk_nope_head_dim": 64, "v_head_dim": 96}
    messages = [message for _, message in refused(narrow, 2)]
    assert any(
        message.startswith("2: the 384 columns of attention's output on 2 ranks are 192") for message in messages
    )


def test_without_groups_or_a_size_of_heads_every_head_has_keys_and_an_equal_part_of_the_width(refused):
    # 384 columns over 4 heads are 96 each; two ranks hold 192 rows of queries, of keys and no whole tile.
    model = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 384, "intermediate_size": 512}
    messages = [message.partition(" each")[0] for _, message in refused(model, 2)]
    assert messages == [f"2: the 384 rows of the {noun} on 2 ranks are 192" for noun in ("queries", "keys")]
    assert refused(model, 1) == []
    assert refused({**model, "head_dim": 128}, 2) == []


def test_tiles_that_are_not_square_are_whole_by_rows_on_one_rank_and_both_ways_on_several(refused):
    model = {"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 192}
    assert refused(model, 1, weight_block_size=[64, 128]) == []
    messages = [message for _, message in refused(model, 2, weight_block_size=[64, 128])]
    assert messages == [
        "2: the 192 columns of a dense layer on 2 ranks are 96 each, no whole number of FP8 tiles of 128. Use 1."
    ]


@pytest.mark.parametrize(
    ("sizes", "keys"),
    [
        ({"tensor": 4, "expert_tensor": 4}, ["expert_tensor"]),
        ({"tensor": 8, "expert_tensor": 2}, ["tensor"]),
        ({"tensor": 4, "expert_tensor": 2}, []),
        ({"tensor": 1, "expert_tensor": 1}, []),
    ],
)
def test_a_trainer_in_block_fp8_is_warned_of_ranks_with_parts_of_tiles(tmp_path, monkeypatch, sizes, keys):
    """768 columns of an expert, and 512 rows of keys."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("")
    config = {**published_config("Qwen3-30B-A3B"), "head_dim": 64, "num_key_value_heads": 8}
    layout = [f"trainer.parallel.{name}={size}" for name, size in sizes.items()]
    for scaling in ("blockwise", "tensorwise"):
        recipe = load_recipe("recipe.yaml", [*GIVEN, *layout, f"trainer.fp8={scaling}"]).recipe
        warned = list(trainer_tile_warnings(recipe, config))
        assert [key for key, _ in warned] == [f"trainer.parallel.{key}" for key in keys if scaling == "blockwise"]
        assert all("tiles of 128. Other layouts" in message for _, message in warned)
