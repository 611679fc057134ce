"""Rules of engines that compute in block FP8: what a rank holds of a layer must be whole tiles.

SGLang judges when it builds a layer (layers/quantization/fp8.py): what it fuses into one matrix, queries with keys and
values and gate with up, on any number of ranks; the rest as soon as two ranks share it. The rules hold on any machine,
also where engines cannot compute in FP8 and get plain weights: a recipe is judged alike on a laptop and on its cluster.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Any

from slimrl.config.model_rules import first_of, num_experts
from slimrl.config.problems import Violation
from slimrl.config.schema import Recipe

EXPERTS = "columns of an expert"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Columns or rows of a layer's matrices that the ranks of an engine share."""

    noun: str
    module: str
    """Name of the layer's module behind `layers.N.`"""
    layers: range
    """Those that have the module"""
    size: int
    ranks: int
    copies: int = 1
    """Ranks that hold the same part"""
    fused: bool = True

    @property
    def share(self) -> int:
        """Of one rank; 0 where the size does not divide, which is another rule's matter."""
        share, rest = divmod(self.size * self.copies, self.ranks)
        return 0 if rest else share


def fp8_tile_violations(recipe: Recipe, hf_config: dict[str, Any]) -> Iterator[Violation]:
    """Sizes of engines whose ranks would get parts of tiles; nothing for a model in another precision."""
    tensor, parts = recipe.rollout.engine_tensor, recipe.rollout.engine_expert
    if tensor % parts:
        return
    for cut in _broken(hf_config, tensor, parts):
        key, wrong, others = "rollout.engine_tensor", tensor, _tensor_sizes(hf_config, tensor, parts)
        if cut.noun == EXPERTS and (more := _expert_sizes(hf_config, tensor, parts)):
            key, wrong, others = "rollout.engine_expert", parts, more
        ranks = f"{cut.ranks} rank{'s' * (cut.ranks > 1)}"
        instead = f" Use {' or '.join(map(str, others))}." if others else ""
        yield (
            key,
            f"{wrong}: the {cut.size} {cut.noun} on {ranks} are {cut.share} each, no whole number of FP8 tiles of "
            f"{_tile(hf_config, cut)}.{instead}",
        )


def _tile(hf_config: dict[str, Any], cut: Cut) -> int:
    rows, columns = hf_config["quantization_config"]["weight_block_size"]
    return lcm(rows, columns) if cut.ranks > 1 else rows


def _broken(hf_config: dict[str, Any], tensor: int, parts: int) -> list[Cut]:
    """What an engine of `tensor` ranks, its experts in `parts`, would cut within tiles."""
    quantization = hf_config.get("quantization_config") or {}
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        return []
    names = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
    plain = [name.removeprefix("model.").strip(".") for name in names]
    return [
        cut
        for cut in _cuts(hf_config, tensor, parts)
        if (cut.fused or cut.ranks > 1) and cut.share % _tile(hf_config, cut) and _is_quantised(cut, plain)
    ]


def _is_quantised(cut: Cut, plain: list[str]) -> bool:
    """Whether one of the layers has this module in FP8; a name in `plain` matches whole parts of a module's path."""
    return any(not any(f".{name}." in f".layers.{layer}.{cut.module}." for name in plain) for layer in cut.layers)


def _cuts(hf_config: dict[str, Any], tensor: int, parts: int) -> Iterator[Cut]:
    layers, experts = first_of(hf_config, "num_hidden_layers"), num_experts(hf_config)
    yield from _attention(hf_config, range(layers), tensor)
    num_dense = first_of(hf_config, "first_k_dense_replace") if experts else layers
    columns = first_of(hf_config, "intermediate_size")
    yield Cut(
        noun="columns of a dense layer", module="mlp.gate_proj", layers=range(num_dense), size=columns, ranks=tensor
    )
    if not experts:
        return
    sparse = range(num_dense, layers)
    width = first_of(hf_config, "moe_intermediate_size", "intermediate_size")
    yield Cut(noun=EXPERTS, module="mlp.experts", layers=sparse, size=width, ranks=tensor // parts)
    shared = width * first_of(hf_config, "n_shared_experts")
    noun, module = "columns of the shared experts", "mlp.shared_experts.gate_proj"
    yield Cut(noun=noun, module=module, layers=sparse, size=shared, ranks=tensor)


def _attention(hf_config: dict[str, Any], layers: range, tensor: int) -> Iterator[Cut]:
    heads = first_of(hf_config, "num_attention_heads")

    def cut(noun: str, module: str, size: int, copies: int = 1) -> Cut:
        return Cut(
            noun=noun,
            module=f"self_attn.{module}",
            layers=layers,
            size=size,
            ranks=tensor,
            copies=copies,
            fused=not hf_config.get("kv_lora_rank"),
        )

    if hf_config.get("kv_lora_rank"):
        nope, rotary, value = (first_of(hf_config, f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        queries = "q_b_proj" if hf_config.get("q_lora_rank") else "q_proj"
        yield cut("rows of the queries", queries, heads * (nope + rotary))
        yield cut("rows of keys and values", "kv_b_proj", heads * (nope + value))
        yield cut("columns of attention's output", "o_proj", heads * value)
        return
    groups = first_of(hf_config, "num_key_value_heads") or heads
    dim = first_of(hf_config, "head_dim") or first_of(hf_config, "hidden_size") // max(heads, 1)
    yield cut("rows of the queries", "q_proj", heads * dim)
    yield cut("rows of the keys", "k_proj", groups * dim, copies=max(1, tensor // max(groups, 1)))


def _tensor_sizes(hf_config: dict[str, Any], tensor: int, parts: int) -> list[int]:
    """The largest smaller engine of whole heads and tiles, if there is one."""
    heads = first_of(hf_config, "num_attention_heads")
    groups = heads if hf_config.get("kv_lora_rank") else first_of(hf_config, "num_key_value_heads") or heads
    smaller = (n for n in range(tensor - 1, 0, -1) if not (heads % n or n % parts or (groups % n and n % groups)))
    return [n for n in smaller if not _broken(hf_config, n, parts)][:1]


def _expert_sizes(hf_config: dict[str, Any], tensor: int, parts: int) -> list[int]:
    """The next two larger numbers of parts with whole experts and tiles, as far as there are any."""
    experts, larger = num_experts(hf_config), range(parts + 1, tensor + 1)
    whole = (n for n in larger if not (tensor % n or experts % n))
    return [n for n in whole if all(cut.noun != EXPERTS for cut in _broken(hf_config, tensor, n))][:2]
