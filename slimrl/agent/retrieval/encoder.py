"""Texts as vectors of length 1, by an encoder of Hugging Face in a folder.

1. The texts are tokenized, at most MAX_TOKENS or what the model can hold.
2. The last hidden states are pooled as the folder's configuration of sentence-transformers says, else averaged over
   the tokens.
3. Texts and queries get the prefixes that the configuration gives to documents and to queries, as `query: `.

Computed in float32 on the CPU, or on the first GPU where vectors of a corpus are made.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer

MAX_TOKENS = 512
"""Longest text where the configuration does not say otherwise."""
_SUPPORTED = ("Transformer", "Pooling", "Normalize")
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


class Encoder:
    """
    Args:
        folder: of a model with its tokenizer, as `save_pretrained` writes it.
        device: of torch.

    Raises:
        ValueError: there is no model, or its configuration asks for what is not supported.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: no encoder; it is a folder with config.json, weights and a tokenizer")
        self._pool = POOLINGS[pooling_of(folder)]
        self._query_prefix, self._text_prefix = _prefixes(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self._device = device
        self.max_tokens = _max_tokens(folder)

    @property
    def num_dims(self) -> int:
        return int(self._model.config.hidden_size)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """float32 [N, D], on the CPU."""
        return self._encode([self._text_prefix + text for text in texts])

    def queries(self, texts: Sequence[str]) -> Tensor:
        """float32 [N, D], on the CPU."""
        return self._encode([self._query_prefix + text for text in texts])

    @torch.inference_mode()
    def _encode(self, texts: list[str]) -> Tensor:
        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        ).to(self._device)
        states_NTD = self._model(**inputs).last_hidden_state
        pooled_ND = self._pool(states_NTD, inputs["attention_mask"].bool())
        return torch.nn.functional.normalize(pooled_ND.float(), dim=-1).cpu()


def pooling_of(folder: Path) -> str:
    """A key of POOLINGS.

    Raises:
        ValueError: the configuration has modules besides pooling, or a pooling that is not supported.
    """
    modules = _json(folder / "modules.json", [])
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    if unknown := [kind for kind in kinds if kind not in _SUPPORTED]:
        raise ValueError(f"{folder}: modules.json has {', '.join(unknown)}; supported are {', '.join(_SUPPORTED)}")
    if "Pooling" not in kinds:
        return "mean"
    config = _json(folder / modules[kinds.index("Pooling")]["path"] / "config.json", {})
    mode = config.get("pooling_mode") or [new for old, new in _OLD_MODES.items() if config.get(old)] or "mean"
    names = [mode] if isinstance(mode, str) else list(mode)
    if len(names) != 1 or names[0] not in POOLINGS:
        raise ValueError(f"{folder}: its pooling is {' and '.join(names)}; supported are {', '.join(POOLINGS)}, alone")
    return str(names[0])


def _mean(states_NTD: Tensor, mask_NT: Tensor) -> Tensor:
    weights_NT1 = mask_NT.unsqueeze(-1).to(states_NTD.dtype)
    return (states_NTD * weights_NT1).sum(1) / weights_NT1.sum(1).clamp(min=1)


def _max(states_NTD: Tensor, mask_NT: Tensor) -> Tensor:
    return states_NTD.masked_fill(~mask_NT.unsqueeze(-1), -torch.inf).amax(1)


def _first(states_NTD: Tensor, mask_NT: Tensor) -> Tensor:
    return _at(states_NTD, mask_NT.int().argmax(1))


def _last(states_NTD: Tensor, mask_NT: Tensor) -> Tensor:
    return _at(states_NTD, mask_NT.shape[1] - 1 - mask_NT.int().flip(1).argmax(1))


def _at(states_NTD: Tensor, places_N: Tensor) -> Tensor:
    return states_NTD[torch.arange(len(states_NTD), device=states_NTD.device), places_N]


POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": _mean,
    "cls": _first,
    "max": _max,
    "lasttoken": _last,
}
"""sentence-transformers' name -> function of the hidden states [N, T, D] and the mask [N, T] of real tokens"""


def _prefixes(folder: Path) -> tuple[str, str]:
    """What is put before a query, and before a passage."""
    prompts = _json(folder / "config_sentence_transformers.json", {}).get("prompts") or {}
    texts = (prompts.get(name) for name in ("document", "passage", "corpus"))
    return prompts.get("query") or "", next((text for text in texts if text), "")


def _max_tokens(folder: Path) -> int:
    told = _json(folder / "sentence_bert_config.json", {}).get("max_seq_length")
    config = AutoConfig.from_pretrained(folder)
    holds = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    # RoBERTa's positions begin behind that of the padding.
    first = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
    return min(told or MAX_TOKENS, holds - first)


def _json(file: Path, default: Any) -> Any:
    return json.loads(file.read_text()) if file.is_file() else default
