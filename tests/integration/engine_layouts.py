"""The families of models, wrapped ones too, and the layouts of engines under which tests start each."""

from small_models import WITH_EXPERTS

from slimrl.models.family import FAMILIES

WRAPPED_WITH_EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe_wrapped", "kimi_k25")
DENSE = ("qwen3", "qwen2", "llama", "qwen3_vl", "qwen3_5_wrapped")

EngineLayout = tuple[int, int, int]
"""(tensor, expert, groups of attention data parallelism)"""


def layouts(family: str) -> list[EngineLayout]:
    """Those of a family with experts: groups where SGLang's model forms them, else more ranks than key-value heads."""
    name = {"qwen3_vl_moe": "qwen3_moe", "kimi_k25": "deepseek_v3"}.get(family, family.removesuffix("_wrapped"))
    (row,) = (one for one in FAMILIES if one.name == name)
    groups = [(2, 1, 2), (4, 2, 2)] if row.attention_groups else [(4, 2, 1)]
    # SGLang loads the experts of gpt-oss into no engine that has them apart.
    return [one for one in [(1, 1, 1), (2, 1, 1), (2, 2, 1), *groups] if one[1] == 1 or family != "gpt_oss"]


ENGINE_LAYOUTS: list[tuple[str, int, int, int]] = [
    *((family, *layout) for family in (*WITH_EXPERTS, *WRAPPED_WITH_EXPERTS) for layout in layouts(family)),
    *(("qwen3_5", *layout) for layout in [(1, 1, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2)]),
    *((family, *layout) for family in DENSE for layout in [(1, 1, 1), (2, 1, 1)]),
]
"""(family, tensor, expert, groups)"""
