"""What a recipe becomes in Megatron's terms."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import megatron.core.utils as megatron_utils
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version
from slimrl_tools.toy.toy_configs import ToySize, toy_config

from slimrl import device
from slimrl.config.alignment import tile_tokens
from slimrl.config.schema.precision import Fp8Scaling, Precision
from slimrl.config.schema.trainer import LoraConfig, LrSchedule, OptimizerConfig, ParallelConfig, TrainerConfig
from slimrl.config.trainer_rules import RECOMPUTABLE, STATE_DTYPES
from slimrl.models.architecture import FACTS_FILE, architecture_of, check_architecture
from slimrl.models.family import family_of
from slimrl.models.megatron_config import LLAMA3_ROPE
from slimrl.models.offline_recipe import read_offline
from slimrl.trainer import build
from slimrl.trainer.build import build_local_chunk, ddp_config, padded_vocab, transformer_config
from slimrl.trainer.layout import parallel
from slimrl.trainer.micro_batch_runner import MicroBatchRunner
from slimrl.trainer.optimizer import _optimizer_config, build_scheduler
from slimrl.trainer.passthrough import converted, fields_for

RECIPES = Path(__file__).parents[2] / "recipes"


def rates(updates, **settings):
    optimizer = SimpleNamespace(param_groups=[{}])
    trainer = TrainerConfig(max_tokens_per_rank=1, optimizer=OptimizerConfig(lr=2.0, **settings))
    scheduler = build_scheduler(trainer, optimizer, updates)
    result = []
    for _ in range(updates):
        scheduler.step(1)
        result.append(optimizer.param_groups[0]["lr"])
    return result


def test_the_constant_schedule_warms_up_linearly_to_its_rate():
    assert rates(6, warmup_updates=4) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])


def test_the_linear_schedule_ends_at_the_smallest_rate():
    assert rates(6, warmup_updates=2, schedule=LrSchedule.linear, min_lr=0.4) == pytest.approx(
        [1.0, 2.0, 1.6, 1.2, 0.8, 0.4]
    )


def test_the_cosine_schedule_follows_half_a_cosine():
    expected = [0.2 + 1.8 * (1 + math.cos(math.pi * n / 5)) / 2 for n in range(1, 6)]
    assert rates(5, schedule=LrSchedule.cosine, min_lr=0.2) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("vocab", "tensor", "rows"), [(101, 1, 101), (101, 2, 102), (104, 8, 104), (151936, 4, 151936)]
)
def test_the_vocabulary_is_padded_to_what_tensor_parallelism_divides(vocab, tensor, rows):
    assert padded_vocab(vocab, tensor) == rows


def trainer(**megatron):
    return TrainerConfig(max_tokens_per_rank=1, optimizer=OptimizerConfig(lr=1.0), megatron=megatron)


MODEL = SimpleNamespace(
    sparse_attention=False,
    multi_latent_attention=False,
    transformer={"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "activation_func": "silu"},
)


def test_passed_through_fields_reach_the_configuration_that_has_them():
    settings = trainer(overlap_grad_reduce=True, recompute_granularity="selective", activation_func="relu")
    assert ddp_config(settings).overlap_grad_reduce
    config = transformer_config(settings, MODEL)
    assert config.recompute_granularity == "selective"
    assert config.activation_func is torch.nn.functional.relu


def test_a_dtype_of_the_optimizer_s_states_is_given_by_its_name():
    given = dict(zip(STATE_DTYPES, ("float16", "bfloat16", "uint8"), strict=True))
    values = fields_for(MegatronOptimizerConfig, given)
    assert values == dict(zip(STATE_DTYPES, (torch.float16, torch.bfloat16, torch.uint8), strict=True))


def test_a_layout_of_stages_that_megatron_asserts_against_is_refused():
    settings = trainer(pipeline_model_parallel_layout="Et|L")
    settings.parallel = ParallelConfig(pipeline=2)
    with pytest.raises(ValueError, match="megatron-core refuses them: Number of decoder"):
        transformer_config(settings, MODEL)


def test_modules_to_recompute_are_those_that_megatron_names():
    with pytest.raises(ValueError, match="megatron-core refuses them") as caught:
        transformer_config(trainer(recompute_granularity="selective", recompute_modules=["none"]), MODEL)
    allowed = re.findall(r"'(\w+)'", str(caught.value).partition("Allowed")[2])
    # Of gated delta nets alone, and the plan has no estimate of it.
    assert sorted({*allowed} - {"gdn_norm_out"}) == sorted(RECOMPUTABLE)


def test_fp8_without_a_gpu_is_refused_unless_it_is_emulated():
    with pytest.raises(ValueError, match="FP8 training needs a GPU"):
        transformer_config(dataclasses.replace(trainer(), fp8=Fp8Scaling.tensorwise), MODEL)
    emulated = dataclasses.replace(trainer(), fp8=Fp8Scaling.tensorwise, fp8_emulation=True)
    assert transformer_config(emulated, MODEL).fp8 is None


def test_emulation_is_refused_where_layers_are_those_of_transformer_engine(monkeypatch):
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    with pytest.raises(ValueError, match="Megatron's own layers"):
        transformer_config(dataclasses.replace(trainer(), fp8=Fp8Scaling.tensorwise, fp8_emulation=True), MODEL)


def test_megatron_takes_the_recipe_of_fp8_training_where_transformer_engine_is(monkeypatch):
    planned = read_offline(RECIPES / "qwen3_moe" / "qwen3_30b_a3b_gspo_fp8_training.yaml", [], "train")
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(megatron_utils, "_te_version", Version("2.3"))
    family = family_of(planned.hf_config)
    config = transformer_config(planned.loaded.recipe.trainer, family.megatron_config(planned.hf_config))
    assert (config.fp8, config.fp8_recipe, config.moe_grouped_gemm) == ("e4m3", "blockwise", True)
    assert _optimizer_config(planned.loaded.recipe.trainer).fp8_recipe == "blockwise"
    # Tokens of an expert are padded in front of its layers, those of the rest by packing to as many.
    assert get_align_size_for_quantization(config) == tile_tokens(planned.loaded.recipe.trainer) == 16
    config.fp8_recipe = "mxfp8"
    assert (
        get_align_size_for_quantization(config)
        == tile_tokens(dataclasses.replace(trainer(), fp8=Fp8Scaling.mxfp8))
        == 32
    )


def test_a_checkpoint_of_another_model_is_refused_with_every_difference_at_once(tmp_path):
    saved = {"hidden_size": 64, "num_layers": 4, "moe_layer_freq": [1, 1]}
    (tmp_path / FACTS_FILE).write_text(json.dumps({"architecture": saved}))
    with pytest.raises(ValueError, match="hidden_size is 64 there and 32 here; num_experts is absent there and 8 here"):
        check_architecture(tmp_path, {**saved, "hidden_size": 32, "num_experts": 8})


def test_a_checkpoint_saved_before_a_fact_was_written_is_of_a_model_without_it(tmp_path):
    config = toy_config("llama", ToySize()) | {"vocab_size": 128}
    saved = architecture_of(config)
    del saved["float32_router"], saved["qk_norm_over_heads"]
    (tmp_path / FACTS_FILE).write_text(json.dumps({"architecture": saved}))
    check_architecture(tmp_path, architecture_of(config))
    with pytest.raises(ValueError, match="qk_norm_over_heads is False there and True here"):
        check_architecture(tmp_path, architecture_of(config) | {"qk_norm_over_heads": True})


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, **LLAMA3_ROPE}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
            r"rotary_base is 1000000\.0 there and 10000000",
        ),
        ({"tie_word_embeddings": True}, "tie_embeddings is False there and True here"),
        ({"rope_parameters": LLAMA3}, r"llama3_rope_factor is None there and 8\.0 here"),
    ],
)
def test_a_checkpoint_whose_model_differs_outside_of_its_layers_is_refused(tmp_path, config, says):
    saved = toy_config("llama", ToySize()) | {
        "vocab_size": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    (tmp_path / FACTS_FILE).write_text(json.dumps({"architecture": architecture_of(saved)}))
    check_architecture(tmp_path, architecture_of(saved | {"dtype": "bfloat16"}))
    with pytest.raises(ValueError, match=says):
        check_architecture(tmp_path, architecture_of(saved | config))


def test_layers_for_multi_token_prediction_are_built_where_the_caller_asks_for_them():
    with_mtp = SimpleNamespace(**vars(MODEL), mtp_layers=2)
    assert transformer_config(trainer(), with_mtp, mtp=True).mtp_num_layers == 2
    assert transformer_config(trainer(), with_mtp).mtp_num_layers is None
    assert transformer_config(trainer(), SimpleNamespace(**vars(MODEL), mtp_layers=0), mtp=True).mtp_num_layers is None


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (
            {"tensor": 2, "sequence": True, "context": 4, "expert": 1, "expert_tensor": 1},
            {
                "tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 4,
                "pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None,
                "variable_seq_lengths": False, "overlap_p2p_comm": False, "batch_p2p_comm": True,
            },
        ),
        (
            {"pipeline": 2},
            {
                "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None,
                "variable_seq_lengths": True, "overlap_p2p_comm": False, "batch_p2p_comm": True,
            },
        ),
        ({"pipeline": 2, "virtual_pipeline": 1}, {"virtual_pipeline_model_parallel_size": None}),
        (
            {"pipeline": 2, "virtual_pipeline": 3},
            {
                "virtual_pipeline_model_parallel_size": 3, "variable_seq_lengths": True, "overlap_p2p_comm": True,
                "batch_p2p_comm": False,
            },
        ),
    ],
)  # fmt: skip
def test_a_layout_reaches_megatron_with_the_messages_that_it_needs(settings, fields):
    given = dataclasses.replace(trainer(), parallel=ParallelConfig(**settings))
    model = SimpleNamespace(**{**vars(MODEL), "transformer": {**MODEL.transformer, "num_layers": 12}})
    config = transformer_config(given, model)
    assert {name: getattr(config, name) for name in fields} == fields
    experts = dataclasses.replace(trainer(), parallel=ParallelConfig(expert=4, expert_tensor=2))
    model.transformer |= {"num_moe_experts": 8, "add_bias_linear": False}
    config = transformer_config(experts, model)
    assert (config.expert_model_parallel_size, config.expert_tensor_parallel_size) == (4, 2)


def test_a_model_with_adapters_has_megatrons_layers_where_transformer_engine_is(monkeypatch):
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    plain = transformer_config(trainer(), MODEL)
    adapted = transformer_config(dataclasses.replace(trainer(), lora=LoraConfig(rank=4)), MODEL)
    assert (plain.transformer_impl, plain.moe_grouped_gemm) == ("transformer_engine", True)
    assert (adapted.transformer_impl, adapted.moe_grouped_gemm) == ("local", False)


def test_a_model_trains_without_dropout_on_losses_of_tokens_and_with_routers_as_they_came():
    config = transformer_config(trainer(), MODEL)
    assert config.calculate_per_token_loss
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)
    assert config.moe_router_dtype == "fp32"
    assert config.moe_router_bias_update_rate == 0.0
    assert config.moe_token_dispatcher_type == "alltoall"
    assert config.activation_func is torch.nn.functional.silu
    assert not config.moe_grouped_gemm
    for precision, dtype in ((Precision.bf16, torch.bfloat16), (Precision.fp32, torch.float32)):
        given = dataclasses.replace(trainer(), precision=precision)
        config = transformer_config(given, MODEL)
        assert config.params_dtype == config.pipeline_dtype == dtype
        assert config.bf16 == (dtype is torch.bfloat16)
        assert _optimizer_config(given).params_dtype == dtype
        assert _optimizer_config(given).bf16 == config.bf16
    # A recipe has the last word on what is no setting of its own.
    given = trainer(hidden_dropout=0.25, moe_router_dtype="fp64", moe_token_dispatcher_type="allgather")
    config = transformer_config(given, MODEL)
    assert (config.hidden_dropout, config.moe_router_dtype, config.moe_token_dispatcher_type) == (
        0.25, "fp64", "allgather",
    )  # fmt: skip


def test_the_optimizer_s_settings_reach_megatron_by_its_names():
    settings = OptimizerConfig(
        lr=0.5, min_lr=0.25, weight_decay=0.1, beta1=0.7, beta2=0.8, eps=0.01, clip_grad=3.0, distributed=False
    )
    given = dataclasses.replace(trainer(decoupled_weight_decay=False), optimizer=settings)
    config = _optimizer_config(given)
    found = (config.lr, config.min_lr, config.weight_decay, config.adam_beta1, config.adam_beta2, config.adam_eps)
    assert found == (0.5, 0.25, 0.1, 0.7, 0.8, 0.01)
    assert (config.optimizer, config.clip_grad, config.use_distributed_optimizer) == ("adam", 3.0, False)
    assert not config.decoupled_weight_decay
    assert not ddp_config(given).use_distributed_optimizer
    assert ddp_config(trainer()).use_distributed_optimizer
    # A NaN is found by the update, which skips it.
    assert not ddp_config(given).check_for_nan_in_grad
    assert ddp_config(given).grad_reduce_in_fp32
    assert not ddp_config(trainer(grad_reduce_in_fp32=False)).grad_reduce_in_fp32


def test_words_become_what_they_name_and_unknown_ones_are_refused():
    found = converted(
        TransformerConfig,
        {"attention_backend": "flash", "params_dtype": "float16", "recompute_method": "uniform", "num_layers": 3},
    )
    assert found == {
        "attention_backend": AttnBackend.flash, "params_dtype": torch.float16, "recompute_method": "uniform",
        "num_layers": 3,
    }  # fmt: skip
    for name in ("attention_backend", "params_dtype", "activation_func"):
        with pytest.raises(ValueError, match=rf"trainer\.megatron\.{name}: 'nonesuch' is unknown"):
            converted(TransformerConfig, {name: "nonesuch"})


@pytest.fixture
def built(monkeypatch):
    """What modules of Megatron would be made with; `place` says which stage asks."""
    seen = SimpleNamespace(place=None, spec=None, mtp=None, model=None)
    monkeypatch.setattr(mpu, "is_pipeline_first_stage", lambda **place: seen.__setattr__("place", place) or "first")
    monkeypatch.setattr(mpu, "is_pipeline_last_stage", lambda **place: "last")

    def decoder(config, fused, **options):
        seen.spec = (fused, options)
        return "a spec"

    def mtp(config, spec, fused, stage):
        seen.mtp = (spec, fused, stage)
        return "an mtp spec"

    def model(config, spec, **options):
        seen.model = (spec, options)

    monkeypatch.setattr(build, "get_gpt_decoder_block_spec", decoder)
    monkeypatch.setattr(build, "mtp_block_spec", mtp)
    monkeypatch.setattr(build, "GPTModel", model)
    monkeypatch.setattr(build, "GptWithMtp", model)
    return seen


@pytest.mark.parametrize("engine", [False, True])
def test_layers_are_transformer_engine_s_where_it_is_and_megatron_s_own_for_looking_at(monkeypatch, built, engine):
    monkeypatch.setattr(device, "has_transformer_engine", lambda: engine)
    monkeypatch.setattr(megatron_utils, "_te_version", Version("2.3"))
    facts = family_of(toy_config("llama", ToySize())).megatron_config(
        toy_config("llama", ToySize()) | {"vocab_size": 9}
    )
    build._gpt(ParallelConfig(), facts, transformer_config(trainer(), facts), 0)
    assert built.spec[0] == engine
    assert built.mtp is None
    build_local_chunk(ParallelConfig(), dataclasses.replace(facts, mtp_layers=1), mtp=True)
    assert built.spec[0] is False
    assert built.mtp == ("a spec", False, None)
    assert built.model[1]["mtp_block_spec"] == "an mtp spec"


def test_a_chunk_has_its_ends_its_vocabulary_and_the_model_s_positions(built):
    facts = dataclasses.replace(
        family_of(toy_config("llama", ToySize())).megatron_config(toy_config("llama", ToySize()) | {"vocab_size": 9}),
        rotary_base=5e5, rotary_percent=0.5, tie_embeddings=True, max_position=77,
    )  # fmt: skip
    config = SimpleNamespace(
        virtual_pipeline_model_parallel_size=3, normalization="RMSNorm", mtp_num_layers=None, transformer_impl="local",
    )  # fmt: skip
    build._gpt(ParallelConfig(tensor=4), facts, config, 2)
    assert built.place == {"ignore_virtual": False, "vp_stage": 2}
    assert built.spec[1] == {"normalization": "RMSNorm", "vp_stage": 2}
    spec, options = built.model
    assert spec == "a spec"
    assert options == {
        "vocab_size": 12, "max_sequence_length": 77, "pre_process": "first", "post_process": "last",
        "parallel_output": True, "share_embeddings_and_output_weights": True, "position_embedding_type": "rope",
        "rotary_base": 5e5, "rotary_percent": 0.5, "rope_scaling": False, "rope_scaling_factor": 1.0,
        "mtp_block_spec": None, "vp_stage": 2,
    }  # fmt: skip
    config.virtual_pipeline_model_parallel_size = None
    build._gpt(ParallelConfig(), dataclasses.replace(facts, llama3_rope_factor=8.0, tie_embeddings=False), config, 0)
    assert built.place == {"ignore_virtual": True, "vp_stage": None}
    options = built.model[1]
    assert (options["rope_scaling"], options["rope_scaling_factor"]) == (True, 8.0)
    assert not options["share_embeddings_and_output_weights"]


def test_pipeline_stages_draw_from_seeds_far_apart_and_replicas_from_the_same(monkeypatch):
    seeds = []
    monkeypatch.setattr(
        parallel, "model_parallel_cuda_manual_seed", lambda seed, **options: seeds.append((seed, options))
    )
    for stage in (0, 1, 3):
        monkeypatch.setattr(mpu, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        parallel.seed_ranks(7)
    assert seeds == [(seed, {"force_reset_rng": True}) for seed in (7, 107, 307)]


def test_a_rank_s_layout_is_what_was_asked_for_and_where_megatron_put_it(monkeypatch):
    """Every size and every place another number."""
    calls = []
    monkeypatch.setattr(mpu, "initialize_model_parallel", lambda *sizes, **options: calls.append((sizes, options)))
    monkeypatch.setattr(parallel, "seed_ranks", lambda seed: calls.append(seed))
    for kind, number in (("tensor_model_parallel", 1), ("pipeline_model_parallel", 2), ("context_parallel", 3)):
        monkeypatch.setattr(mpu, f"get_{kind}_rank", lambda number=number: number)
    monkeypatch.setattr(mpu, "get_data_parallel_rank", lambda: 4)
    monkeypatch.setattr(mpu, "get_data_parallel_world_size", lambda: 13)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 99)
    given = ParallelConfig(
        tensor=6, pipeline=7, virtual_pipeline=8, context=9, expert=10, expert_tensor=11, sequence=True
    )
    found = parallel.init_model_parallel(given, timeout_s=90, seed=12, tile=16)
    sizes = {
        "context_parallel_size": 9, "expert_model_parallel_size": 10, "expert_tensor_parallel_size": 11,
        "distributed_timeout_minutes": 2,
    }  # fmt: skip
    assert calls == [((6, 7, 8), sizes), 12]
    assert dataclasses.asdict(found) == {
        "rank": 5, "world_size": 99, "tensor": 6, "pipeline": 7, "virtual_pipeline": 8, "expert": 10,
        "expert_tensor": 11, "context": 9, "data": 13, "sequence": True, "tensor_rank": 1, "pipeline_rank": 2,
        "context_rank": 3, "data_rank": 4, "tile": 16,
    }  # fmt: skip
    plain = parallel.init_model_parallel(ParallelConfig(), timeout_s=60, seed=12)
    assert (plain.virtual_pipeline, plain.tile) == (1, 1)
    assert calls[2][1]["distributed_timeout_minutes"] == 1


def test_sums_of_an_update_are_added_over_ranks_by_name_and_told_to_the_other_stages(monkeypatch):
    """Another rank reports the same names in another order."""
    told = []
    monkeypatch.setattr(mpu, "get_data_parallel_group", lambda with_context_parallel: ("data", with_context_parallel))
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_last_rank", lambda: 6)
    monkeypatch.setattr(mpu, "get_pipeline_model_parallel_group", lambda: "pipeline")

    def all_reduce(totals, group):
        assert (totals.dtype, group) == (torch.float64, ("data", True))
        totals += torch.tensor([10.0, 20.0])

    def broadcast(sums, src, group):
        told.append((src, group))
        sums[0] = sums[0] or {"from": 6.0}

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    reported = [{"loss": torch.tensor(float(n)), "clipped": torch.tensor(n / 2)} for n in (1, 2)]

    def reduced(*, last, pipeline, parts):
        layout = SimpleNamespace(is_last_stage=last, pipeline=pipeline)
        return MicroBatchRunner._reduce(SimpleNamespace(layout=layout), parts)

    assert reduced(last=True, pipeline=1, parts=reported) == {"clipped": 11.5, "loss": 23.0}
    assert told == []
    assert reduced(last=True, pipeline=2, parts=reported) == {"clipped": 11.5, "loss": 23.0}
    assert reduced(last=False, pipeline=2, parts=[]) == {"from": 6.0}
    assert told == [(6, "pipeline")] * 2


def test_gradients_of_routed_experts_alone_go_to_the_expert_data_parallel_group():
    """Megatron's own mark: `allreduce` is False for what expert ranks do not share."""
    routed = [
        f"decoder.layers.1.mlp.experts.{name}" for name in ("local_experts.0.linear_fc1.weight", "linear_fc2.weight1")
    ]
    shared = [
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.1.mlp.router.weight",
    ]
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in (*routed, *shared)}
    build._mark_experts(SimpleNamespace(named_parameters=lambda: parameters.items()))
    assert [name for name in parameters if not getattr(parameters[name], "allreduce", True)] == routed
