"""Rules across the settings of a recipe, each by one recipe that breaks it alone."""

import json
import re
from dataclasses import replace

import pytest
from recipe_problems import recipe_problems

from slimrl.config.check import check_loaded, check_recipe
from slimrl.config.keys import KEY_TYPES, NAME, type_of
from slimrl.config.load import load_recipe, read_recipe
from slimrl.config.problems import RecipeError
from slimrl.config.schema.algorithm import AlgorithmName
from slimrl.config.trainer_rules import padded_tokens

MODEL = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
}
DENSE = {name: value for name, value in MODEL.items() if name not in ("num_experts", "moe_intermediate_size")}

GIVEN = [
    "steps=3", "run.name=demo", "model.path=model", "data.train=train.jsonl", "reward.function=a.b:c",
    "trainer.max_tokens_per_rank=512", "trainer.optimizer.lr=1e-6", "algorithm.max_logprob_mismatch=1e-4",
    "rollout.max_trajectory_tokens=512", "rollout.sampling.max_new_tokens=64",
    "rollout.eval_sampling.max_new_tokens=64",
    "sft.max_tokens=512",
]  # fmt: skip


ON_HOST = (
    "trainer.megatron.optimizer_cpu_offload=true trainer.megatron.optimizer_offload_fraction=1.0 "
    "trainer.megatron.use_precision_aware_optimizer=true"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("")
    return tmp_path


def problems_of(overrides, model=MODEL, command="train"):
    return recipe_problems("recipe.yaml", GIVEN + overrides, model, command)


@pytest.mark.parametrize(
    "layout",
    [
        "num_ranks=4,parallel.tensor=2,parallel.sequence=true,parallel.pipeline=2,parallel.expert=2",
        "num_ranks=8,parallel.context=2,parallel.expert=8",
        "num_ranks=4,parallel.pipeline=2,parallel.virtual_pipeline=2,parallel.expert=2",
        "num_ranks=2,parallel.expert_tensor=2",
    ],
)
def test_a_layout_that_divides_ranks_and_model_has_no_problems(folder, layout):
    assert problems_of([f"trainer.{part}" for part in layout.split(",")]) == []


def test_evaluations_and_rollouts_may_sample_from_fewer_tokens_than_training(folder):
    fewer = "{top_p: 0.8, top_k: 20, max_new_tokens: 64}"
    assert problems_of([f"rollout.eval_sampling={fewer}"]) == []
    assert problems_of([f"rollout.sampling={fewer}"], command="rollout") == []
    refused = problems_of([f"rollout.sampling={fewer}"], command="train --trajectories")
    assert [problem.key for problem in refused] == ["rollout.sampling.top_p", "rollout.sampling.top_k"]


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ("trainer.num_ranks=3 trainer.parallel.context=2", "trainer.num_ranks",
         "3 is not a multiple of tensor 1 x pipeline 1 x context 2 = 2. Use 2 or 4."),
        ("trainer.num_ranks=2 trainer.parallel.expert=4", "trainer.parallel.expert",
         "expert 4 x expert_tensor 1 x pipeline 1 = 4 does not divide trainer.num_ranks 2. Use 2."),
        ("trainer.num_ranks=3 trainer.parallel.pipeline=2", "trainer.num_ranks",
         "3 is not a multiple of tensor 1 x pipeline 2 x context 1 = 2. Use 2 or 4."),
        ("trainer.num_ranks=2 trainer.parallel.pipeline=2 trainer.parallel.expert_tensor=2", "trainer.parallel.expert",
         "expert 1 x expert_tensor 2 x pipeline 2 = 4 does not divide trainer.num_ranks 2."),
        ("trainer.num_ranks=2 trainer.parallel.expert=2 trainer.megatron.moe_token_dispatcher_type=allgather",
         "trainer.megatron.moe_token_dispatcher_type",
         "allgather needs equally many tokens on every expert-parallel rank, and packed micro-batches differ in "
         "length. Use alltoall."),
        ("trainer.num_ranks=8 trainer.parallel.expert=5 trainer.parallel.expert_tensor=2", "trainer.parallel.expert",
         "5 does not divide the model's 128 experts. Use 4."),
        ("trainer.num_ranks=8 trainer.parallel.expert=5 trainer.parallel.pipeline=2", "trainer.parallel.expert",
         "5 does not divide the model's 128 experts. Use 4."),
        ("trainer.num_ranks=8 trainer.parallel.expert_tensor=5 trainer.parallel.expert=2",
         "trainer.parallel.expert_tensor", "5 does not divide the model's 768 columns of an expert. Use 4."),
        ("trainer.num_ranks=8 trainer.parallel.expert_tensor=5 trainer.parallel.pipeline=2",
         "trainer.parallel.expert_tensor", "5 does not divide the model's 768 columns of an expert. Use 4."),
        ("trainer.num_ranks=8 trainer.parallel.tensor=3 trainer.parallel.pipeline=2 trainer.parallel.context=2",
         "trainer.parallel.tensor", "3 does not divide the model's 32 attention heads. Use 2."),
        *((f"trainer.num_ranks=6 trainer.parallel.pipeline=3 trainer.parallel.sequence=true trainer.parallel.{name}=2",
           "trainer.parallel.pipeline", "3 does not divide the model's 8 layers. Use 1, or set "
           "trainer.megatron.num_layers_in_last_pipeline_stage: 2.")
          for name in ("tensor", "context", "expert", "expert_tensor")),
        ("trainer.num_ranks=12 trainer.parallel.expert=12", "trainer.parallel.expert",
         "12 does not divide the model's 128 experts. Use 4."),
        ("trainer.num_ranks=8 trainer.parallel.tensor=8 trainer.parallel.sequence=true", "trainer.parallel.tensor",
         "8 does not divide the model's 4 key-value heads, which the trainer does not split. Use 4."),
        ("trainer.num_ranks=5 trainer.parallel.expert_tensor=5", "trainer.parallel.expert_tensor",
         "5 does not divide the model's 768 columns of an expert. Use 1."),
        ("trainer.num_ranks=3 trainer.parallel.pipeline=3", "trainer.parallel.pipeline",
         "3 does not divide the model's 8 layers. Use 1, or set "
         "trainer.megatron.num_layers_in_last_pipeline_stage: 2."),
        ("trainer.num_ranks=5 trainer.parallel.pipeline=5", "trainer.parallel.pipeline",
         "5 does not divide the model's 8 layers. Use 1."),
        ("trainer.num_ranks=2 trainer.parallel.pipeline=2 trainer.parallel.virtual_pipeline=3",
         "trainer.parallel.virtual_pipeline",
         "pipeline 2 x virtual_pipeline 3 = 6 does not divide the model's 8 layers. Use 2 or 4."),
        ("trainer.parallel.virtual_pipeline=2", "trainer.parallel.virtual_pipeline",
         "needs trainer.parallel.pipeline above 1."),
        ("trainer.num_ranks=2 trainer.parallel.pipeline=2 trainer.parallel.virtual_pipeline=1",
         "trainer.parallel.virtual_pipeline", "1: must be at least 2."),
        ("trainer.num_ranks=2 trainer.parallel.tensor=2", "trainer.parallel.sequence",
         "a Mixture-of-Experts model with tensor above 1 needs sequence: true."),
        ("trainer.parallel.sequence=true", "trainer.parallel.sequence",
         "sequence parallelism needs trainer.parallel.tensor above 1."),
        ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt",
         "1: grpo advantages compare samples of one prompt. Use 2 or more."),
        ("rollout.prompts_per_step=7 trainer.updates_per_rollout=2", "rollout.prompts_per_step",
         "7 groups do not divide into trainer.updates_per_rollout 2 equal updates. Use 6 or 8."),
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature",
         "0 is greedy: every sample of a group would be the same. Use 1."),
        ("rollout.sampling.top_p=0.8", "rollout.sampling.top_p",
         "0.8: engines would sample from fewer tokens than the trainer's log-probs, which cover the whole "
         "vocabulary. Use 1; rollout.eval_sampling may differ."),
        ("rollout.sampling.top_k=20", "rollout.sampling.top_k",
         "20: engines would sample from fewer tokens than the trainer's log-probs, which cover the whole "
         "vocabulary. Use -1; rollout.eval_sampling may differ."),
        ("trainer.num_ranks=2 trainer.parallel.context=2 trainer.max_tokens_per_rank=255",
         "trainer.max_tokens_per_rank",
         "255 x context 2 = 510 tokens cannot hold one sequence of rollout.max_trajectory_tokens 512 (padded 512). "
         "Use 256 or more."),
        ("rollout.sampling.max_new_tokens=512", "rollout.sampling.max_new_tokens",
         "512 leaves no room for a prompt in rollout.max_trajectory_tokens 512."),
        ("rollout.tool_timeout_s=700", "rollout.tool_timeout_s",
         "700.0 is longer than rollout.trajectory_timeout_s 600.0."),
        ("rollout.engine_tp=4 rollout.engine_nodes=3 resync.transport=disk", "rollout.engine_nodes",
         "3 does not divide rollout.engine_tp 4. Use 2 or 4."),
        ("rollout.engine_tp=4 rollout.engine_attention_dp=3", "rollout.engine_attention_dp",
         "3 does not divide rollout.engine_tp 4. Use 2 or 4."),
        ("rollout.engine_tp=2 rollout.engine_attention_dp=2 deterministic=true", "rollout.engine_attention_dp",
         "2: requests reach the groups of an engine at different moments, so a deterministic run cannot repeat its "
         "batches. Use 1, or deterministic false."),
        ("rollout.engine_tp=2 rollout.engine_attention_dp=2 rollout.engine_nodes=2 resync.transport=disk",
         "rollout.engine_attention_dp", "2: engines in groups run on one node, and rollout.engine_nodes is 2. Set "
         "either to 1."),
        ("rollout.engine_tp=24 rollout.engine_attention_dp=2 rollout.engine_ep=8", "rollout.engine_tp",
         "24 in 2 groups of 12 does not divide the model's 32 attention heads. Use 16 or 32."),
        ("rollout.chunk_tokens=64 deterministic=true", "rollout.chunk_tokens",
         "64: parts of a turn that fail are asked for again at any moment, so a deterministic run cannot repeat its "
         "batches. Use 0, or deterministic false."),
        ("rollout.adaptive_concurrency=true deterministic=true", "rollout.adaptive_concurrency",
         "how full the engines' caches are depends on the clock, so a deterministic run cannot repeat it. Use false, "
         "or deterministic false."),
        ("rollout.chunk_tokens=-1", "rollout.chunk_tokens", "-1: must be at least 0."),
        ("rollout.engine_attention_dp=0", "rollout.engine_attention_dp", "0: must be at least 1."),
        ("resync.transport=delta", "resync.local_dir",
         "delta needs a folder on a local disk of each node, with room for the model."),
        ("rollout.colocated=true resync.transport=p2p", "rollout.colocated",
         "p2p needs engines on devices of their own. Use resync.transport ipc, or colocated false."),
        ("rollout.engine_tp=4 rollout.engine_nodes=2 rollout.colocated=true resync.transport=p2p",
         "rollout.colocated",
         "p2p needs engines on devices of their own. Use resync.transport ipc, or colocated false."),
        ("rollout.max_replacements=-1", "rollout.max_replacements", "-1: must be at least 0."),
        ("rollout.min_engines=5 rollout.num_engines=2", "rollout.min_engines",
         "5 is above rollout.num_engines 2. Use at most 2."),
        ("rollout.max_engines=1 rollout.num_engines=2", "rollout.max_engines",
         "1 is below rollout.num_engines 2. Use 2 or more."),
        *(
            (f"rollout.max_engines=3 rollout.num_engines=2 {setting}", "rollout.max_engines",
             "3 lets engines join on other nodes. Use rollout.colocated false, resync.transport p2p, disk or "
             "delta, rollout.engine_nodes 1 and deterministic false, or leave it out.")
            for setting in ("resync.transport=ipc", "deterministic=true resync.transport=disk",
                            "rollout.colocated=true resync.transport=disk trainer.num_ranks=4",
                            "rollout.engine_tp=2 rollout.engine_nodes=2 resync.transport=disk")
        ),
        *(
            (f"rollout.min_engines=1 rollout.num_engines=2 {setting}", "rollout.min_engines",
             "1 lets a run start without all of its engines, which a colocated or deterministic one needs. Leave it "
             "out.")
            for setting in ("deterministic=true", "rollout.colocated=true trainer.num_ranks=4")
        ),
        ("rollout.engine_tp=3", "rollout.engine_tp",
         "3 does not divide the model's 32 attention heads. Use 2 or 4."),
        ("rollout.engine_tp=2 rollout.engine_ep=4", "rollout.engine_ep",
         "4 does not divide rollout.engine_tp 2. Use 2."),
        ("rollout.engine_tp=12 rollout.engine_ep=12", "rollout.engine_ep",
         "12 does not divide the model's 128 experts. Use 4."),
        ("trainer.num_ranks=0", "trainer.num_ranks", "0: must be at least 1."),
        ("rollout.sampling.top_p=0", "rollout.sampling.top_p", "0: must be greater than 0."),
        ("rollout.eval_sampling.top_k=0", "rollout.eval_sampling.top_k", "0: must be at least 1, or -1 for off."),
        ("trainer.optimizer.schedule=cosine trainer.optimizer.warmup_updates=9 trainer.updates_per_rollout=3 "
         "rollout.prompts_per_step=3", "trainer.optimizer.warmup_updates",
         "9 updates of warm-up leave none of the 9 updates of the run for the cosine schedule."),
        ("trainer.fp8=tensorwise trainer.precision=fp32", "trainer.fp8",
         "FP8 needs bf16 for the other layers, not fp32. Set trainer.precision to bf16."),
        ("trainer.num_ranks=10 trainer.parallel.tensor=4 trainer.parallel.sequence=true trainer.parallel.expert=8",
         "trainer.num_ranks", "10 is not a multiple of tensor 4 x pipeline 1 x context 1 = 4. Use 8 or 16."),
        ("trainer.num_ranks=12 trainer.parallel.expert=8", "trainer.parallel.expert",
         "expert 8 x expert_tensor 1 x pipeline 1 = 8 does not divide trainer.num_ranks 12. Use 4."),
        ("trainer.num_ranks=2 trainer.parallel.pipeline=2 trainer.megatron.num_layers_in_last_pipeline_stage=-4",
         "trainer.megatron.num_layers_in_last_pipeline_stage", "-4: must be at least 1."),
        ("trainer.megatron.num_layers_in_first_pipeline_stage=0",
         "trainer.megatron.num_layers_in_first_pipeline_stage", "0: must be at least 1."),
        (f"{ON_HOST} trainer.megatron.optimizer_offload_fraction=1.5", "trainer.megatron.optimizer_offload_fraction",
         "1.5: must lie between 0 and 1."),
        ("trainer.optimizer.lr=.inf", "trainer.optimizer.lr", "inf: must be a finite number."),
        ("trainer.optimizer.min_lr=1e-3", "trainer.optimizer.min_lr", "0.001 is above trainer.optimizer.lr 1e-06."),
        ("run.dir=$HOME/runs", "run.dir",
         "'$HOME/runs' is not expanded. Write ${oc.env:HOME} instead."),
        ("data.eval.a=~/a.jsonl", "data.eval.a",
         "'~/a.jsonl' is not expanded. Write ${oc.env:HOME} instead."),
        ("trainer.fp8_emulation=true", "trainer.fp8_emulation",
         "has no effect with trainer.fp8 off. Choose blockwise, as engines have it."),
        ("trainer.megatron.fp8_margin=1", "trainer.megatron.fp8_margin", "has no effect with trainer.fp8 off."),
        ("trainer.fp8=mxfp8 trainer.precision=bf16 trainer.megatron.fp8_wgrad=true", "trainer.megatron.fp8_wgrad",
         "has an effect with trainer.fp8 delayed, not mxfp8."),
        ("trainer.fp8=delayed trainer.precision=bf16 trainer.megatron.first_last_layers_bf16=true",
         "trainer.megatron.first_last_layers_bf16", "megatron-core refuses it with delayed scaling. Leave it out."),
        ("trainer.fp8=delayed trainer.fp8_emulation=true trainer.megatron.fp8_wgrad=false",
         "trainer.megatron.fp8_wgrad", "false is not emulated. Leave it out."),
        ("trainer.fp8=delayed trainer.fp8_emulation=true trainer.mtp.train=true", "trainer.fp8_emulation",
         "with delayed scaling layers for multi-token prediction are not emulated. Use mtp.train false."),
        ("trainer.fp8=delayed trainer.fp8_emulation=true trainer.megatron.recompute_granularity=selective",
         "trainer.fp8_emulation",
         "with delayed scaling a recomputed layer would round with later scales. Leave out "
         "trainer.megatron.recompute_granularity."),
        ("trainer.megatron.recompute_granularity=full", "trainer.megatron.recompute_granularity",
         "full needs a method. Set recompute_method: uniform and recompute_num_layers: 1."),
        ("trainer.megatron.recompute_method=block", "trainer.megatron.recompute_method",
         "block needs recompute_granularity: full."),
        ("trainer.mtp.train=true trainer.megatron.recompute_granularity=full "
         "trainer.megatron.recompute_method=uniform trainer.megatron.recompute_num_layers=2",
         "trainer.megatron.recompute_num_layers",
         "2: layers for multi-token prediction (trainer.mtp.train) need 1."),
        ("rollout.speculative.mode=mtp resync.transport=disk", "rollout.speculative.mode",
         "mtp: with resync.transport disk SGLang would read the draft model's weights from the policy's version, which "
         "lacks them. Use ipc or p2p, or trainer.mtp.train true, or ngram."),
        ("rollout.speculative.mode=eagle3 rollout.speculative.draft_model=/d resync.transport=delta "
         "resync.local_dir=/l", "rollout.speculative.mode",
         "eagle3: with resync.transport delta SGLang would read the draft model's weights from the policy's version, "
         "which lacks them. Use ipc or p2p, or ngram."),
        ("rollout.speculative.mode=ngram deterministic=true", "rollout.speculative.mode",
         "ngram: what is proposed depends on the clock and on other requests. Use off, or deterministic false."),
        ("rollout.speculative.mode=ngram rollout.routed_experts=true", "rollout.speculative.mode",
         "ngram: the experts that engines report are not known to be those of the accepted tokens. Use off, or "
         "rollout.routed_experts false."),
        ("rollout.speculative.mode=ngram rollout.engine_tp=2 rollout.engine_attention_dp=2", "rollout.speculative.mode",
         "ngram: SGLang has none with rollout.engine_attention_dp 2. Use another mode, or 1."),
        ("rollout.speculative.mode=eagle3", "rollout.speculative.draft_model",
         "eagle3 needs the folder of its draft model."),
        ("rollout.speculative.mode=ngram rollout.speculative.draft_model=/d", "rollout.speculative.draft_model",
         "only the modes eagle and eagle3 read it, and the mode is ngram."),
        ("rollout.speculative.num_draft_tokens=1", "rollout.speculative.num_draft_tokens", "1: must be at least 2."),
        ("rollout.sglang.speculative_attention_mode=decode", "rollout.sglang.speculative_attention_mode",
         "has no effect with rollout.speculative.mode off."),
        ("rollout.speculative.mode=mtp rollout.sglang.speculative_ngram_capacity=9",
         "rollout.sglang.speculative_ngram_capacity",
         "has no effect with rollout.speculative.mode mtp, only with ngram."),
        ("rollout.sglang.log_requests_level=1", "rollout.sglang.log_requests_level",
         "has no effect without rollout.sglang.log_requests."),
        ("trainer.megatron.moe_aux_loss_coeff=0.01 trainer.megatron.moe_router_load_balancing_type=none",
         "trainer.megatron.moe_aux_loss_coeff",
         "has no effect without trainer.megatron.moe_router_load_balancing_type."),
        ("trainer.megatron.moe_aux_loss_coeff=0.01", "trainer.megatron.moe_aux_loss_coeff",
         "has no effect without trainer.megatron.moe_router_load_balancing_type."),
        ("trainer.megatron.optimizer_offload_fraction=0.5", "trainer.megatron.optimizer_offload_fraction",
         "has no effect without trainer.megatron.optimizer_cpu_offload."),
        ("trainer.megatron.recompute_modules=[mlp]", "trainer.megatron.recompute_modules",
         "has no effect without trainer.megatron.recompute_granularity."),
        ("trainer.megatron.deallocate_pipeline_outputs=true", "trainer.megatron.deallocate_pipeline_outputs",
         "has no effect with trainer.parallel.pipeline 1."),
        ("trainer.num_ranks=2 trainer.parallel.pipeline=2 trainer.megatron.overlap_p2p_comm_warmup_flush=true",
         "trainer.megatron.overlap_p2p_comm_warmup_flush",
         "has no effect with trainer.parallel.virtual_pipeline null."),
        ("trainer.megatron.clone_scatter_output_in_embedding=true",
         "trainer.megatron.clone_scatter_output_in_embedding", "has no effect with trainer.parallel.sequence false."),
        ("trainer.megatron.cp_comm_type=a2a", "trainer.megatron.cp_comm_type",
         "has no effect with trainer.parallel.context 1."),
        ("trainer.megatron.tp_only_amax_red=true", "trainer.megatron.tp_only_amax_red",
         "has no effect with trainer.fp8 off."),
        ("trainer.mtp.loss_weight=0.0", "trainer.mtp.loss_weight", "0.0: must be greater than 0."),
        ("trainer.megatron.recompute_granularity=selective trainer.megatron.recompute_modules=[mlp,moe_atc]",
         "trainer.megatron.recompute_modules", "'moe_atc' is not one of core_attn, layernorm, mla_up_proj, mlp, moe, "
         "moe_act, shared_experts. Did you mean moe_act?"),
        ("trainer.megatron.exp_avg_dtype=bfloat16", "trainer.megatron.exp_avg_dtype",
         "has no effect without trainer.megatron.use_precision_aware_optimizer."),
        ("trainer.megatron.exp_avg_dtype=bfloat16 trainer.megatron.use_precision_aware_optimizer=false",
         "trainer.megatron.exp_avg_dtype", "bfloat16 needs use_precision_aware_optimizer: true."),
        ("trainer.megatron.main_params_dtype=uint8", "trainer.megatron.main_params_dtype",
         "'uint8' is not one of float32, float16."),
        (f"{ON_HOST} trainer.megatron.exp_avg_sq_dtype=float16", "trainer.megatron.exp_avg_sq_dtype",
         "an offloaded optimizer (optimizer_cpu_offload) keeps float32. Leave it out."),
        ("trainer.megatron.optimizer_cpu_offload=true trainer.megatron.use_precision_aware_optimizer=true",
         "trainer.megatron.optimizer_cpu_offload",
         "offloads nothing by itself. Set optimizer_offload_fraction, 1.0 for all of it."),
        ("trainer.megatron.optimizer_cpu_offload=true trainer.megatron.optimizer_offload_fraction=1.0",
         "trainer.megatron.optimizer_cpu_offload", "main weights would stay on the device, and a checkpoint could not "
         "be loaded. Set use_precision_aware_optimizer: true."),
        (f"{ON_HOST} trainer.precision=fp32", "trainer.megatron.optimizer_cpu_offload",
         "needs weights in bf16, not fp32. Set trainer.precision to bf16."),
        (f"{ON_HOST} trainer.optimizer.distributed=false", "trainer.megatron.use_precision_aware_optimizer",
         "needs trainer.optimizer.distributed: true."),
        ("trainer.num_ranks=3 trainer.parallel.pipeline=3 trainer.megatron.num_layers_in_last_pipeline_stage=1",
         "trainer.megatron.num_layers_in_last_pipeline_stage",
         "1 of the model's 8 layers leave 7, which do not divide over the other 2 stages. "
         "Set trainer.megatron.num_layers_in_last_pipeline_stage: 2."),
        ("trainer.num_ranks=3 trainer.parallel.pipeline=3 trainer.parallel.virtual_pipeline=2 "
         "trainer.megatron.num_layers_in_last_pipeline_stage=2", "trainer.parallel.virtual_pipeline",
         "2 does not divide the 3 layers of a stage. Use null."),
        ("rollout.colocated=true rollout.num_engines=2 trainer.num_ranks=1", "rollout.num_engines",
         "2 engines of 1 ranks do not fit on the 1 devices of the trainer that they share. Use 1, or colocated false."),
        ("rollout.colocated=true rollout.sglang.mem_fraction_static=0.95", "rollout.sglang.mem_fraction_static",
         "0.95 leaves a colocated trainer 5% of a device for the memory that it keeps while engines "
         "generate: its context, communication buffers and resync buffers. Use 0.85 or less."),
        ("rollout.sglang.mem_fraction_static=1.5", "rollout.sglang.mem_fraction_static",
         "1.5: must lie between 0 and 1, both excluded."),
        ("rollout.sglang.context_length=256", "rollout.sglang.context_length",
         "256 is shorter than rollout.max_trajectory_tokens 512."),
        ("eval.every_steps=4", "eval.every_steps", "4, but data.eval names no evaluation set. Use 0."),
        ("trainer.optimizer.lr=0", "trainer.optimizer.lr", "0: must be greater than 0."),
        ("run.name=a/b", "run.name", "'a/b' is not a valid name; use letters, digits, '.', '_' and '-'."),
        ("data.eval.a/b=x.jsonl", "data.eval.a/b", "'a/b' is not a valid name; use letters, digits, '.', '_' and '-'."),
        ("agent.max_result_chars=8", "agent.max_result_chars", "8: must be at least 16."),
        ("sft.summary_every_steps=0", "sft.summary_every_steps", "0: must be at least 1."),
        ("agent.tools=[calculator]", "agent.tools", "'calculator' is not an import path; write module:function."),
        ("agent.tools=[own.task.add]", "agent.tools",
         "'own.task.add' is not an import path; write module:function. Did you mean own.task:add?"),
        ("agent.parser=hermess", "agent.parser",
         "'hermess' is neither a parser of SGLang nor an import path module:name. Did you mean hermes?"),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_by_key_with_what_to_use_instead(folder, overrides, key, message):
    assert message in [problem.message for problem in problems_of(overrides.split()) if problem.key == key]


@pytest.mark.parametrize("name", ["deallocate_pipeline_outputs", "overlap_p2p_comm_warmup_flush"])
def test_what_a_layout_has_no_use_for_may_be_turned_off(folder, name):
    assert problems_of([f"trainer.megatron.{name}=false"]) == []


@pytest.mark.parametrize("key", ["trainer.num_ranks", "trainer.parallel.tensor", "trainer.parallel.expert",
                                 "trainer.parallel.expert_tensor", "trainer.parallel.pipeline",
                                 "rollout.engine_tp", "rollout.engine_ep"])  # fmt: skip
def test_a_size_that_a_refusal_proposes_is_not_refused(folder, key):
    layout = "trainer.num_ranks=8 trainer.parallel.tensor=2 trainer.parallel.sequence=true trainer.parallel.expert=4"
    engine = ["rollout.engine_tp=4", "rollout.engine_ep=2"]
    right = load_recipe("recipe.yaml", [*GIVEN, *layout.split(), *engine]).recipe

    def refusals(recipe):
        return [problem for problem in check_recipe(recipe, MODEL, "train") if not problem.warning]

    def changed(recipe, key, size):
        section, _, rest = key.partition(".")
        return replace(recipe, **{section: changed(getattr(recipe, section), rest, size) if rest else size})

    assert refusals(right) == []
    proposals = 0
    for size in (3, 5, 6, 7, 9, 10, 12, 24):
        wrong = changed(right, key, size)
        for problem in refusals(wrong):
            found = re.search(r"Use (\d+)(?: or (\d+))?", problem.message)
            for number in filter(None, found.groups() if found else ()):
                again = refusals(changed(wrong, problem.key, int(number)))
                assert problem.key not in [other.key for other in again], (size, problem, number, again)
                proposals += 1
    assert proposals


@pytest.mark.parametrize(
    "key",
    [
        *(f"trainer.parallel.{name}" for name in ("tensor", "pipeline", "expert", "expert_tensor", "context")),
        *("trainer.num_ranks", "rollout.engine_tp", "rollout.engine_ep"),
        *(f"trainer.megatron.num_layers_in_{end}_pipeline_stage" for end in ("first", "last")),
        *("critic.trainer.parallel.expert", "critic.trainer.num_ranks"),
        "critic.trainer.megatron.num_layers_in_first_pipeline_stage",
    ],
)
def test_a_size_of_nothing_is_all_that_is_said_since_other_rules_divide_by_it(folder, key):
    (problem,) = problems_of([f"{key}=0", "rollout.samples_per_prompt=1"])
    assert (problem.key, problem.message, problem.warning) == (key, "0: must be at least 1.", False)


@pytest.mark.parametrize(
    ("keys", "taken", "refused"),
    [
        ("steps rollout.num_engines resync.bucket_bytes resync.keep sft.max_tokens checkpoint.keep "
         "trainer.max_skipped_updates rollout.max_turns trainer.updates_per_rollout critic.trainer.num_ranks",
         [1], [0, -1]),
        ("trainer.optimizer.lr trainer.optimizer.eps algorithm.clip_low rollout.request_timeout_s resync.timeout_s "
         "algorithm.max_logprob_mismatch checkpoint.grace_s trainer.timeout_s stop.grad_norm stop.entropy_min",
         [1e-9, 5.0], [0, -1]),
        ("seed trainer.optimizer.warmup_updates trainer.optimizer.weight_decay rollout.sampling.temperature "
         "rollout.min_engines rollout.max_engines "
         "eval.every_steps checkpoint.every_steps rollout.max_replacements tracking.trajectories_per_step "
         "trainer.optimizer.clip_grad trainer.optimizer.min_lr critic.warmup_steps critic.value_clip", [0, 1], [-1]),
        ("tracking.recorded_trajectories_per_step", [0, -1], [-2]),
        ("tracking.recorded_bytes", [1], [0]),
        ("agent.max_result_chars", [16], [15]),
        ("rollout.max_failed_fraction trainer.megatron.optimizer_offload_fraction critic.gae_lambda",
         [0, 1], [-0.01, 1.01]),
        ("algorithm.credit.discount critic.discount", [0.01, 1], [0, 1.01]),
        ("trainer.optimizer.beta1 trainer.optimizer.beta2 critic.trainer.optimizer.beta1", [0, 0.999], [-0.1, 1]),
        ("rollout.sampling.top_p rollout.eval_sampling.top_p", [0.01, 1], [0, 1.01]),
        ("rollout.sampling.top_k rollout.eval_sampling.top_k", [-1, 1], [0, -2]),
    ],
)  # fmt: skip
def test_each_number_has_its_range_with_the_ends_that_belong_to_it(folder, keys, taken, refused):
    for key in keys.split():
        said = {value: [p for p in problems_of([f"{key}={value}"]) if p.key == key] for value in [*taken, *refused]}
        assert [value for value in said if not any(" must " in p.message for p in said[value])] == taken, key


def test_every_number_of_a_recipe_has_a_range_and_no_word_is_one(folder):
    kinds = (int, float, int | None, float | None, bool)
    keys = [key.replace(NAME, "x") for key, kind in KEY_TYPES.items() if kind in kinds]
    said = {problem.key: problem.message for problem in problems_of([f"{key}='1'" for key in keys])}
    assert [key for key in keys if not said[key].startswith("expected ")] == []
    said = {problem.key: problem.message for problem in problems_of([f"{key}=true" for key in keys])}
    numbers = [key for key in keys if type_of(key) is not bool]
    assert [key for key in numbers if not said[key].startswith("expected ")] == []
    of_range = {p.key for key in numbers for p in problems_of([f"{key}=-9"]) if p.message.startswith("-9: must be ")}
    unbounded = {"algorithm.selection.min_reward", "eval.pass_reward"}
    unbounded |= {f"reward.{section}.x.weight" for section in ("parts", "by_name", "group")}
    assert set(numbers) - of_range == unbounded


def test_a_number_out_of_range_does_not_hide_broken_rules(folder):
    found = problems_of(["stop.kl=-1", "reward.alarm_steps=3", "rollout.request_timeout_s=601"])
    assert [problem.key for problem in found] == ["reward.alarm_steps", "stop.kl", "rollout.request_timeout_s"]


def test_a_number_for_a_text_of_another_form_is_judged_by_the_rules_as_a_text(folder):
    found = problems_of(["agent.tools=[5]"])
    assert [(problem.key, problem.message) for problem in found] == [
        ("agent.tools", "'5' is not an import path; write module:function."),
    ]
    loaded, _ = read_recipe("recipe.yaml", [*GIVEN, "agent.tools=[5]", "trainer.optimizer.lr=-1"])
    assert loaded.recipe.agent.tools == ["5"]
    assert [type(one.optimizer.lr) for one in (loaded.recipe.trainer, loaded.recipe.critic.trainer)] == [float, float]


@pytest.mark.parametrize(
    ("overrides", "fraction", "told"),
    [
        ("rollout.colocated=true", 0.85, None),
        ("rollout.colocated=true", 0.86, "leaves a colocated trainer 14% of a device"),
        ("rollout.colocated=false resync.transport=p2p", 0.86, None),
        ("rollout.colocated=true", 1, "1: must lie between 0 and 1, both excluded."),
        ("rollout.colocated=true", 0, "0: must lie between 0 and 1, both excluded."),
    ],
)
def test_a_share_of_memory_has_its_limits(folder, overrides, fraction, told):
    problems = problems_of([*overrides.split(), f"rollout.sglang.mem_fraction_static={fraction}"])
    assert len(problems) == (0 if told is None else 1)
    assert all(told in problem.message and problem.key.endswith("mem_fraction_static") for problem in problems)


def test_an_engine_larger_than_the_trainer_whose_devices_it_shares_is_told_its_size(folder):
    colocated = ["rollout.colocated=true", "rollout.sglang.mem_fraction_static=0.5"]
    (problem,) = problems_of([*colocated, "rollout.engine_tp=4", "trainer.num_ranks=2"])
    assert problem.key == "rollout.num_engines"
    assert problem.message.endswith("Use rollout.engine_tp 2 or less, or colocated false.")
    fit = ["rollout.engine_tp=2", "rollout.num_engines=2", "trainer.num_ranks=4"]
    assert problems_of([*colocated, *fit]) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ("rollout.sglang.context_length=511", "rollout.sglang.context_length"),
        ("rollout.eval_sampling.max_new_tokens=512", "rollout.eval_sampling.max_new_tokens"),
        ("rollout.request_timeout_s=601", "rollout.request_timeout_s"),
    ],
)
def test_lengths_and_deadlines_within_each_other_may_be_equal_where_it_makes_sense(folder, overrides, key):
    (problem,) = [problem for problem in problems_of(overrides.split()) if not problem.warning]
    assert problem.key == key
    equal = "rollout.sglang.context_length=512 rollout.eval_sampling.max_new_tokens=511 rollout.request_timeout_s=600"
    assert problems_of([*equal.split(), "rollout.tool_timeout_s=600", "rollout.routed_experts=true"]) == []


@pytest.mark.parametrize("transport", ["ipc", "p2p", "disk", "delta resync.local_dir=copies"])
def test_layers_that_are_trained_may_draft_whatever_the_transport(folder, transport):
    wanted = f"trainer.mtp.train=true rollout.speculative.mode=mtp resync.dir=versions resync.transport={transport}"
    assert "rollout.speculative.mode" not in [problem.key for problem in problems_of(wanted.split())]


def test_folders_that_the_transport_uses_and_devices_of_its_own_are_no_warning(folder):
    disk = ["resync.transport=disk", "resync.dir=versions"]
    delta = ["resync.transport=delta", "resync.dir=versions", "resync.local_dir=copies"]
    assert problems_of(disk) == problems_of(delta) == []
    fraction = "rollout.sglang.mem_fraction_static=0.5"
    assert problems_of([fraction, "resync.transport=p2p"]) == problems_of([fraction, *disk]) == []
    assert problems_of([fraction, "rollout.colocated=true"]) == []


@pytest.mark.parametrize("key", ["run.dir", "model.path", "model.megatron", "data.train", "resync.dir"])
@pytest.mark.parametrize(
    ("path", "variable"),
    [
        ("~", "HOME"),
        ("~/x", "HOME"),
        ("a/$B_1/c", "B_1"),
        ("a${C}", "C"),
        ("~me/x", None),
        ("a~/x", None),
        ("a$", None),
    ],
)
def test_what_a_shell_would_replace_is_named_in_each_path(folder, key, path, variable):
    written = path.replace("${", r"\${")
    said = [problem.message for problem in problems_of([f"{key}='{written}'"]) if "expanded" in problem.message]
    assert len(said) == (variable is not None)
    assert all(f"${{oc.env:{variable}}}" in message for message in said)


@pytest.mark.parametrize(
    ("name", "right"), [("a-1_b.c", True), ("0", True), ("", False), (".a", False), ("a/b", False)]
)
def test_names_of_runs_and_of_sets_are_those_of_files(folder, name, right):
    given = {"run.name": f"run.name='{name}'"} | ({} if "." in name else {f"data.eval.{name}": f"data.eval.{name}=x"})
    assert {problem.key for problem in problems_of(list(given.values()))} == (set() if right else given.keys())


def test_an_import_path_of_a_parser_is_taken(folder):
    assert problems_of(["agent.parser=my.calls:Parser"]) == []
    (problem,) = problems_of(["agent.parser=my.calls:Parser:x"])
    assert problem.message.startswith(
        "'my.calls:Parser:x' is neither a parser of SGLang nor an import path module:name."
    )


def test_expert_parallelism_of_a_dense_model_is_refused(folder):
    (problem,) = problems_of(["trainer.num_ranks=2", "trainer.parallel.expert=2"], model=DENSE)
    assert (problem.key, problem.message) == ("trainer.parallel.expert", "2: the model has no experts. Use 1.")


def test_an_expert_parallel_engine_of_a_dense_model_is_refused(folder):
    (problem,) = problems_of(["rollout.engine_tp=2", "rollout.engine_ep=2"], model=DENSE)
    assert (problem.key, problem.message) == ("rollout.engine_ep", "2: the model has no experts. Use 1.")


def test_groups_of_ranks_of_a_dense_model_are_refused(folder):
    (problem,) = problems_of(["rollout.engine_tp=2", "rollout.engine_attention_dp=2"], model=DENSE)
    assert problem.key == "rollout.engine_attention_dp"
    assert problem.message == "2: the model has no experts to spread over the groups. Use 1, and more engines."


def test_groups_let_an_engine_have_more_ranks_than_the_model_has_heads(folder):
    assert problems_of(["rollout.engine_tp=64", "rollout.engine_ep=64", "rollout.engine_attention_dp=4"]) == []
    (problem,) = problems_of(["rollout.engine_tp=64", "rollout.engine_ep=64"])
    assert problem.message.startswith("64 does not divide the model's 32 attention heads.")


def test_ranks_of_an_expert_parallel_engine_need_not_divide_the_columns_of_an_expert(folder):
    model = {**MODEL, "moe_intermediate_size": 30}
    problems = problems_of(["rollout.engine_tp=4"], model=model)
    assert "4 does not divide the model's 30 columns of an expert." in problems[0].message
    assert problems_of(["rollout.engine_tp=4", "rollout.engine_ep=2"], model=model) == []


def test_shared_experts_and_the_dense_layers_before_them_are_divided_too(folder):
    model = {**MODEL, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 12}
    layout = "num_ranks=8,parallel.tensor=8,parallel.sequence=true"
    problems = problems_of(
        [f"trainer.{part}" for part in layout.split(",")],
        model={**model, "num_key_value_heads": 8, "intermediate_size": 20},
        command="sft",
    )
    assert [(problem.key, problem.message) for problem in problems if not problem.warning] == [
        ("trainer.parallel.tensor", "8 does not divide the model's 12 columns of the shared experts. Use 4."),
        ("trainer.parallel.tensor", "8 does not divide the model's 20 columns of a dense layer. Use 4."),
    ]


@pytest.mark.parametrize("dense", [{"mlp_only_layers": [3]}, {"decoder_sparse_step": 2}, {}])
def test_single_layers_without_experts_are_divided_too(folder, dense):
    layout = ["trainer.num_ranks=4", "trainer.parallel.tensor=4", "trainer.parallel.sequence=true"]
    found = problems_of(layout, model={**MODEL, "intermediate_size": 6, **dense}, command="sft")
    expected = ["4 does not divide the model's 6 columns of a dense layer. Use 2."] * bool(dense)
    assert [problem.message for problem in found if not problem.warning] == expected


def test_the_key_heads_of_linear_attention_are_divided_by_tensor_and_context_parallelism_together(folder):
    model = {**MODEL, "linear_num_key_heads": 4, "shared_expert_intermediate_size": 64}
    ranks = ["trainer.num_ranks=16", "trainer.parallel.sequence=true"]

    def said(*layout):
        found = problems_of([*ranks, *(f"trainer.parallel.{part}" for part in layout)], model=model, command="sft")
        return [(problem.key, problem.message) for problem in found if not problem.warning]

    assert said("tensor=2", "context=2") == []
    message = "does not divide the model's 4 key heads of linear attention."
    assert said("tensor=2", "context=4") == [("trainer.parallel.context", f"tensor 2 x context 4 = 8 {message} Use 2.")]
    # 8 does not divide the heads either; 4 would, but not with two context-parallel ranks.
    assert said("tensor=8", "context=2")[0][1].endswith("key-value heads, which the trainer does not split. Use 2.")
    (problem,) = problems_of(["rollout.engine_tp=8"], model={**model, "num_attention_heads": 8})
    assert (problem.key, problem.message) == (
        "rollout.engine_tp", f"8 {message} Use 4.",
    )  # fmt: skip


def test_a_dense_model_has_no_experts_to_report(folder):
    (problem,) = problems_of(["rollout.routed_experts=true"], model=DENSE)
    assert (problem.key, problem.message) == ("rollout.routed_experts", "the model has no experts. Use false.")


def test_routing_replay_needs_experts_that_are_reported_and_a_router_that_asks_for_them(folder):
    def said(*overrides, model=MODEL, command="train"):
        return [(p.key, p.message) for p in problems_of(list(overrides), model=model, command=command) if not p.warning]

    key, reported = "algorithm.routing_replay", "rollout.routed_experts=true"
    assert said(f"{key}=train") == said(f"{key}=rollout", reported) == []
    (missing,) = said(f"{key}=rollout")
    assert missing == (
        key, "rollout needs the experts that engines report. Set rollout.routed_experts: true.",
    )  # fmt: skip
    assert said(f"{key}=train", model=DENSE) == [(key, "train: the model has no experts. Use off.")]
    assert said(f"{key}=rollout", model=DENSE) == [(key, "rollout: the model has no experts. Use off.")]
    (supervised,) = said(f"{key}=train", command="sft")
    assert supervised == (key, "train: supervised training has no earlier pass and no engine to replay. Use off.")
    fused = "trainer.megatron.moe_router_fusion"
    assert [name for name, _ in said(f"{key}=train", f"{fused}=true")] == [fused]
    assert said(f"{fused}=true") == []
    assert said(f"{key}=train", "trainer.megatron.moe_router_load_balancing_type=aux_loss") == []


def test_engines_may_repeat_key_value_heads(folder):
    assert problems_of(["rollout.engine_tp=8"]) == []


def test_uneven_pipelines_are_left_to_megatron_when_the_recipe_asks_for_them(folder):
    layout = [
        "trainer.num_ranks=3",
        "trainer.parallel.pipeline=3",
        "trainer.megatron.num_layers_in_first_pipeline_stage=2",
    ]
    assert problems_of(layout) == []


def test_a_trajectory_is_no_longer_than_the_positions_of_the_model(folder):
    model = {**MODEL, "max_position_embeddings": 256}
    (problem,) = problems_of([], model=model)
    assert problem.key == "rollout.max_trajectory_tokens"
    assert problem.message == "512 is longer than the model's 256 positions."
    assert problems_of(["rollout.sglang.context_length=512"], model=model) == []
    (problem,) = problems_of([], model=model, command="sft")
    assert (problem.key, problem.message) == ("sft.max_tokens", "512 is longer than the model's 256 positions.")


def test_what_a_recipe_inherits_for_the_optimizer_on_the_host_may_stay_where_that_is_turned_off(folder):
    on_host = [*ON_HOST.split(), "trainer.precision=bf16"]
    assert problems_of(on_host) == problems_of([*on_host, "trainer.megatron.optimizer_cpu_offload=false"]) == []


def test_states_of_the_precision_aware_optimizer_have_their_dtypes_by_name(folder):
    names = ["main_params_dtype=float16", "exp_avg_dtype=uint8", "exp_avg_sq_dtype=bfloat16"]
    aware = "trainer.megatron.use_precision_aware_optimizer=true"
    assert problems_of([aware, *(f"trainer.megatron.{name}" for name in names)]) == []


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_warm_up_may_take_more_updates_than_the_run_has_steps(folder, schedule):
    updates = ["trainer.updates_per_rollout=3", "rollout.prompts_per_step=3"]
    optimizer = [f"trainer.optimizer.schedule={schedule}", "trainer.optimizer.warmup_updates=8"]
    assert problems_of([*updates, *optimizer]) == []


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ("trainer.num_ranks=4 trainer.parallel.tensor=4 trainer.parallel.sequence=true", "trainer.parallel.expert",
         "with expert 1 and expert_tensor 1 each of the tensor-parallel ranks holds all 128 experts whole."),
        ("trainer.num_ranks=8 trainer.parallel.expert=8 rollout.prompts_per_step=2 rollout.samples_per_prompt=2",
         "rollout.prompts_per_step", "4 trajectories of an update leave 4 of 8 data-parallel ranks without work."),
        ("rollout.colocated=true rollout.sglang.mem_fraction_static=0.5 trainer.num_ranks=4 trainer.parallel.expert=4",
         "rollout.num_engines", "3 of the 4 devices that engines share with the trainer have no engine and are "
         "idle during a rollout. 4 engines would fit."),
        ("rollout.colocated=true", "rollout.colocated", "without rollout.sglang.mem_fraction_static SGLang takes "
         "memory as if it were alone on a GPU. Set it to 0.85 or less."),
        ("rollout.sglang.mem_fraction_static=0.5", "rollout.colocated", "with resync.transport ipc engines run on the "
         "trainer's GPUs, and false lets both keep all of their memory. Set true, or resync.transport p2p for "
         "engines on GPUs of their own."),
        ("trainer.optimizer.warmup_updates=10 trainer.updates_per_rollout=3 rollout.prompts_per_step=3",
         "trainer.optimizer.warmup_updates",
         "10 updates of warm-up are more than the 9 of the run, which never reaches trainer.optimizer.lr."),
        ("trainer.optimizer.warmup_updates=4", "trainer.optimizer.warmup_updates",
         "4 updates of warm-up are more than the 3 of the run, which never reaches trainer.optimizer.lr."),
        ("resync.dir=versions", "resync.dir", "has no effect with resync.transport ipc, only with disk and delta."),
        ("resync.transport=disk resync.local_dir=copies", "resync.local_dir",
         "has no effect with resync.transport disk, only with delta."),
    ],
)  # fmt: skip
def test_what_runs_but_is_probably_not_meant_is_a_warning(folder, overrides, key, message):
    assert [(p.key, p.message) for p in problems_of(overrides.split()) if p.warning] == [(key, message)]


def test_ranks_that_share_a_trajectory_count_once_for_those_that_have_work(folder):
    layout = ["tensor=2", "sequence=true", "pipeline=2", "context=2", "expert=2"]
    of_8 = [f"trainer.parallel.{part}" for part in layout]
    few = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "trainer.updates_per_rollout=4"]
    assert problems_of([*of_8, *few, "trainer.num_ranks=16"]) == []
    (problem,) = problems_of([*of_8, *few, "trainer.num_ranks=32"])
    assert problem.warning
    assert problem.message.startswith("2 trajectories of an update leave 2 of 4 data-parallel ranks")


def test_an_interleaved_pipeline_of_uneven_ends_has_whole_chunks_everywhere(folder):
    ends = [f"trainer.megatron.num_layers_in_{end}_pipeline_stage=2" for end in ("first", "last")]
    layout = ["trainer.num_ranks=4", "trainer.parallel.pipeline=4", *ends]
    assert problems_of([*layout, "trainer.parallel.virtual_pipeline=2"]) == []
    (problem,) = problems_of([*layout, "trainer.parallel.virtual_pipeline=3"])
    assert problem.message == "3 does not divide the 2 layers of a stage. Use 2."
    (problem,) = problems_of(["trainer.num_ranks=2", "trainer.parallel.pipeline=2", *ends])
    assert (problem.key, problem.message) == (
        "trainer.megatron.num_layers_in_last_pipeline_stage", "needs trainer.parallel.pipeline above 2."
    )  # fmt: skip
    (problem,) = problems_of(["trainer.num_ranks=5", "trainer.parallel.pipeline=5", *ends])
    assert problem.message == "2 and 2 of the model's 8 layers leave 4, which do not divide over the other 3 stages."
    by_hand = ["trainer.num_ranks=5", "trainer.parallel.pipeline=5"]
    assert problems_of([*by_hand, "trainer.megatron.account_for_loss_in_pipeline_split=true"]) == []


def test_rules_of_settings_that_a_command_does_not_read_say_nothing(folder):
    trainer, engine = ["trainer.num_ranks=3", "trainer.parallel.context=2"], ["rollout.engine_tp=3"]
    batch = ["rollout.samples_per_prompt=1"]
    keys = {
        command: {problem.key for problem in problems_of([*trainer, *engine, *batch], command=command)}
        for command in ("train", "train --trajectories", "sft", "rollout", "export", "resync bench")
    }
    ranks, tensor, samples = "trainer.num_ranks", "rollout.engine_tp", "rollout.samples_per_prompt"
    assert keys == {
        "train": {ranks, tensor, samples}, "train --trajectories": {ranks, tensor, samples}, "sft": {ranks},
        "rollout": {tensor}, "export": {ranks}, "resync bench": {ranks, tensor},
    }  # fmt: skip


def test_evaluations_in_training_need_a_set_and_may_be_left_out(folder):
    assert problems_of(["eval.every_steps=0"]) == []
    (problem,) = problems_of(["eval.every_steps=5"])
    assert (problem.key, problem.message) == ("eval.every_steps", "5, but data.eval names no evaluation set. Use 0.")
    assert problems_of(["eval.every_steps=5", "data.eval.a=a.jsonl"]) == []
    assert problems_of(["eval.every_steps=5"], command="sft") == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("data.eval.a=a.jsonl eval.every_steps=2 eval.at_start=false", None),
        ("data.eval.a=a.jsonl eval.at_start=true", None),
        ("data.eval.a=a.jsonl eval.at_start=false", "eval.every_steps is 0 and eval.at_start false"),
        ("eval.at_start=true", "data.eval names no evaluation set. Use 0."),
    ],
)
def test_engines_for_evaluations_need_one_that_runs_beside_the_training(folder, settings, message):
    beside = [
        "rollout.mode=async", "rollout.num_engines=2", "deterministic=false", "algorithm.correction.level=token",
        "resync.transport=p2p", "eval.engines=1",
    ]  # fmt: skip
    found = [problem.message for problem in problems_of([*beside, *settings.split()]) if problem.key == "eval.engines"]
    assert len(found) == (message is not None), found
    assert all(message in one for one in found)


def test_a_clip_range_made_for_token_ratios_is_a_warning(folder):
    (problem,) = problems_of(["algorithm.clip_high=0.2"])
    assert problem.warning
    assert problem.key == "algorithm.clip_high"
    assert problems_of(["algorithm.clip_high=0.01", "algorithm.clip_low=0.01"]) == []
    both = problems_of(["algorithm.clip_high=0.011", "algorithm.clip_low=0.011"])
    assert [problem.key for problem in both] == ["algorithm.clip_low", "algorithm.clip_high"]


def test_a_clip_range_made_for_sequence_ratios_is_a_warning_with_token_ratios(folder):
    both = problems_of(["algorithm.name=grpo", "algorithm.clip_high=4e-4", "algorithm.clip_low=3e-4"])
    assert [(problem.key, problem.warning) for problem in both] == [
        ("algorithm.clip_low", True), ("algorithm.clip_high", True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", [name.value for name in AlgorithmName])
def test_every_algorithm_by_its_name_has_no_problems(folder, name):
    teacher = ["teacher.path=models/teacher"] if name == "distillation" else []
    assert problems_of([f"algorithm.name={name}", *teacher]) == []


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ("loss=gsop", "loss", "'gsop' is neither one of ours nor an import path module:function. Did you mean gspo?"),
        ("advantage=grop", "advantage", "Did you mean grpo?"),
        ("loss=ppo clip_low=1.5 clip_high=0.2", "clip_low", "Use at most 1, which is no lower bound."),
        ("loss=gmpo clip_low=1 clip_high=0.2", "clip_low", "Use less than 1."),
        ("name=grpo dual_clip=0.9", "dual_clip", "0.9: it bounds ratios above 1."),
        ("dual_clip=3", "dual_clip", "the loss gspo has none."),
        ("kl_coef=0.1 kl_estimator=k1", "kl_estimator", "Use k2 or k3, or algorithm.kl_place: reward."),
        ("name=grpo kl_coef=0.1 kl_place=reward", "kl_estimator", "Use k1."),
        ("kl_coef=0.1 kl_place=reward kl_estimator=k1", "kl_place", "Use loss: gspo_token."),
        ("old_policy=rollout correction.level=token", "old_policy", "Use trainer, or no correction."),
        ("old_policy=rollout correction.veto=1e-4", "old_policy", "Use trainer, or no correction."),
        ("correction.level=token correction.mode=mask correction.low=3", "correction.low", "is not below"),
        (
            "correction.level=token correction.low=3",
            "correction.low",
            "only algorithm.correction.mode clip and mask read it, and the mode is truncate. Use 0, or another mode.",
        ),
        ("correction.veto=1", "correction.veto", "use one such as 1e-4."),
    ],
)
def test_settings_of_an_algorithm_that_exclude_each_other_are_refused(folder, overrides, key, message):
    (problem,) = problems_of([f"algorithm.{one}" for one in overrides.split()])
    assert (problem.key, problem.warning) == (f"algorithm.{key}", False)
    assert message in problem.message


def test_what_excludes_each_other_may_be_off(folder):
    for fine in (
        "kl_estimator=k1", "kl_place=reward", "old_policy=rollout", "correction.low=3",
        "name=gspo_token kl_coef=0.1 kl_place=reward kl_estimator=k1", "name=grpo dual_clip=3",
        "correction.level=token correction.mode=clip correction.low=0.5",
        "loss=tasks.mine:loss clip_low=0.2 clip_high=0.2",
    ):  # fmt: skip
        assert problems_of([f"algorithm.{one}" for one in fine.split()]) == [], fine


def test_one_sample_of_a_prompt_is_enough_without_a_baseline(folder):
    (problem,) = problems_of(["rollout.samples_per_prompt=1"])
    assert problem.key == "rollout.samples_per_prompt"
    assert problems_of(["rollout.samples_per_prompt=1", "algorithm.name=reinforce_pp"]) == []


def test_sft_is_measured_by_its_own_conversation_length(folder):
    (problem,) = problems_of(["sft.max_tokens=600"], command="sft")
    assert problem.message.startswith("512 x context 1 = 512 tokens cannot hold one sequence of sft.max_tokens 600")


@pytest.mark.parametrize(
    ("tensor", "context", "padded"), [(1, 1, 101), (2, 1, 102), (1, 2, 104), (2, 2, 104), (1, 4, 104)]
)
def test_sequences_are_padded_for_tensor_and_context_parallelism(folder, tensor, context, padded):
    overrides = [f"trainer.parallel.tensor={tensor}", f"trainer.parallel.context={context}"]
    recipe = load_recipe("recipe.yaml", GIVEN + overrides).recipe
    assert padded_tokens(101, recipe) == padded


def test_sequences_of_fp8_training_are_padded_to_whole_tiles_which_the_budget_must_hold(folder):
    overrides = [
        "trainer.num_ranks=4", "trainer.parallel.tensor=2", "trainer.parallel.sequence=true",
        "trainer.parallel.context=2", "trainer.fp8=blockwise", "rollout.max_trajectory_tokens=500",
    ]  # fmt: skip
    assert padded_tokens(101, load_recipe("recipe.yaml", GIVEN + overrides).recipe) == 128
    problems = problems_of([*overrides, "trainer.max_tokens_per_rank=252"])
    (problem,) = (problem for problem in problems if problem.key == "trainer.max_tokens_per_rank")
    assert problem.message.endswith("rollout.max_trajectory_tokens 500 (padded 512). Use 256 or more.")


def test_missing_files_and_broken_rules_come_together_with_their_lines(folder):
    (folder / "recipe.yaml").write_text(
        "data:\n  eval:\n    heldout: nowhere.jsonl\nrollout:\n  samples_per_prompt: 1\n"
    )
    problems = check_loaded(load_recipe("recipe.yaml", [*GIVEN, "trainer.updates_per_rollout=5"]))
    assert str(RecipeError(problems)).splitlines() == [
        "command line: data.train: train.jsonl: no such file.",
        "recipe.yaml:3: data.eval.heldout: nowhere.jsonl: no such file.",
        "command line: model.path: model: no such folder.",
        "recipe.yaml:5: rollout.samples_per_prompt: 1: grpo advantages compare samples of one prompt. Use 2 or more.",
        "recipe.yaml (default): rollout.prompts_per_step: 32 groups do not divide into trainer.updates_per_rollout 5 "
        "equal updates. Use 30 or 35.",
        "5 problems. Nothing was started.",
    ]


def test_the_model_is_read_from_its_folder(folder):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "train.jsonl").write_text("")
    assert check_loaded(load_recipe("recipe.yaml", GIVEN)) == []
    problems = check_loaded(load_recipe("recipe.yaml", [*GIVEN, "rollout.engine_tp=3"]))
    assert "does not divide the model's 32 attention heads" in str(RecipeError(problems))
    (folder / "model" / "config.json").write_text("{")
    assert "model/config.json:1: not JSON" in str(RecipeError(check_loaded(load_recipe("recipe.yaml", GIVEN))))


def test_eval_needs_an_evaluation_set(folder):
    problems = check_loaded(load_recipe("recipe.yaml", GIVEN, command="eval"))
    assert "names no evaluation set." in [problem.message for problem in problems if problem.key == "data.eval"]
