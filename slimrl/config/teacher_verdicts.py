"""The verdict on each field of SGLang's ServerArgs that `teacher.sglang` could name: those of `rollout.sglang`, but for
what a resync, drafts or another key of the recipe decide."""

from dataclasses import replace

from slimrl.config.sglang_verdicts import SGLANG_VERDICTS
from slimrl.config.verdicts import Judgement, Verdict, judged, table

_ONLY_SCORES = "slimrl: a teacher keeps its memory and its weights, and only scores"

_OWNERS = {
    "teacher.path": "model_path",
    "teacher.engine_tp": "tp_size",
    "teacher.engine_ep": "ep_size",
    "teacher.num_engines": "dp_size attn_dp_size",
    "teacher.engine_tp and teacher.engine_nodes": "pp_size",
    "teacher.engine_nodes": "nnodes",
    "teacher.max_concurrency_per_engine": "max_queued_requests",
    _ONLY_SCORES: (
        "enable_memory_saver enable_weights_cpu_backup enable_draft_weights_cpu_backup enable_return_routed_experts "
        "disaggregation_mode weight_version"
    ),
}


def _of_teacher(name: str, judgement: Judgement) -> Judgement:
    """The verdict on a field for a teacher: no resync reaches it, so it may hold its weights as it likes, and it drafts
    nothing."""
    if name.startswith("speculative_"):
        return Judgement(verdict=Verdict.no_effect, reason="has no effect: a teacher only scores.")
    if judgement.verdict is Verdict.layout or name in ("quantization", "json_model_override_args"):
        return Judgement(verdict=Verdict.safe, reason="the layout of a teacher's weights")
    return replace(judgement, values=(), instead="")


TEACHER_VERDICTS = {name: _of_teacher(name, judgement) for name, judgement in SGLANG_VERDICTS.items()} | table(
    *(judged(Verdict.slimrl, f"is set by {owner}.", fields) for owner, fields in _OWNERS.items())
)
"""The verdict on each field, by its name."""
