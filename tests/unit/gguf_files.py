"""Small GGUF files, written with llama.cpp's own package."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = list(bytes_to_unicode().values())
TOKENS = [*SPECIAL, *ALPHABET, "Ġ1", "ĠĠ", "12"]
MERGES = ["Ġ 1", "Ġ Ġ", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

HIDDEN, HEADS, KV_HEADS, LAYERS = 256, 4, 2, 2
EXPERTS, EXPERT_WIDTH = 4, 768
"""transformers reads no width of an expert from GGUF: it is Qwen3-30B-A3B's."""

HEAD_DIMS = {"llama": 64, "qwen2": 64, "qwen3": 128, "qwen3moe": 64}
"""transformers reads no head_dim of Qwen3 from GGUF: it is Qwen3's."""

K_QUANTS = {Kind.Q4_K: (144, (0, 2)), Kind.Q6_K: (210, (208,))}
"""Bytes of a block of 256 values, and where its scales in float16 are; the package cannot quantise to these."""


def tensor_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, in torch's order of dimensions."""
    width, kv_width = HEADS * HEAD_DIMS[arch], KV_HEADS * HEAD_DIMS[arch]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if arch != "llama":
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        of_layer = {
            "attn_norm.weight": (HIDDEN,),
            "ffn_norm.weight": (HIDDEN,),
            "attn_q.weight": (width, HIDDEN),
            "attn_k.weight": (kv_width, HIDDEN),
            "attn_v.weight": (kv_width, HIDDEN),
            "attn_output.weight": (HIDDEN, width),
        }
        if arch == "qwen2":
            of_layer |= {"attn_q.bias": (width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
        if arch.startswith("qwen3"):
            of_layer |= dict.fromkeys(("attn_q_norm.weight", "attn_k_norm.weight"), (HEAD_DIMS[arch],))
        if arch == "qwen3moe":
            up, down = (EXPERTS, EXPERT_WIDTH, HIDDEN), (EXPERTS, HIDDEN, EXPERT_WIDTH)
            of_layer |= {"ffn_gate_inp.weight": (EXPERTS, HIDDEN), "ffn_gate_exps.weight": up}
            of_layer |= {"ffn_up_exps.weight": up, "ffn_down_exps.weight": down}
        else:
            of_layer |= dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), (512, HIDDEN))
            of_layer["ffn_down.weight"] = (HIDDEN, 512)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def random_values(arch: str, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in tensor_shapes(arch).items()}


def write_gguf(
    file: Path,
    arch: str,
    kinds: list[Kind],
    values: dict[str, np.ndarray] | None = None,
    *,
    split: str = "smollm",
    keys: dict[str, int | float | str] | None = None,
) -> Path:
    """A file with a model: matrices take the kinds in turn, others are float32. `keys` replace or are added."""
    values = random_values(arch) if values is None else values
    writer = gguf.GGUFWriter(file, arch)
    known: dict[str, int | float | str] = {
        "general.name": "small",
        "general.license": "apache-2.0",
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": 512,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.rope.freq_base": 10000.0,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    if arch == "qwen3moe":
        known |= {
            f"{arch}.expert_count": EXPERTS,
            f"{arch}.expert_used_count": 2,
            f"{arch}.attention.key_length": HEAD_DIMS[arch],
        }
    for key, value in {**known, **(keys or {})}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    writer.add_token_list(TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL else normal for token in TOKENS])
    writer.add_token_merges(MERGES)
    for index, (name, tensor) in enumerate(values.items()):
        kind = kinds[index % len(kinds)] if tensor.ndim > 1 else Kind.F32
        if kind in (Kind.F32, Kind.F16):
            writer.add_tensor(name, tensor.astype(np.float16 if kind is Kind.F16 else np.float32))
        else:
            stored = k_quants(tensor.shape, kind, index) if kind in K_QUANTS else gguf.quantize(tensor, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def k_quants(shape: tuple[int, ...], kind: Kind, seed: int) -> np.ndarray:
    """Blocks of random bits with small scales."""
    size, scales = K_QUANTS[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    for start in scales:
        blocks[..., start : start + 2] = np.array([0.001], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
