"""What tests ask of a real engine about the weights that it serves, and what transformers says of the same."""

from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from slimrl.config.hf_config import read_hf_config
from slimrl.config.wrapper import wrapper_of
from slimrl.engines.engine_key import EngineKey

KEY = EngineKey("the key of the tests' engines")

PROMPT = [5, 300, 77, 41, 12, 260, 99, 8, 130, 211]
NUM_TOKENS = 12


def engine_logprobs(url: str, timeout_s: float = 60.0, *, group: int = 0) -> torch.Tensor:
    """float32 [len(PROMPT) - 1]: of each prompt token but the first.

    Args:
        group: of the engine's ranks, to compute them.
    """
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "routed_dp_rank": group,
    }
    answer = httpx.post(f"{url}/generate", json=body, headers=KEY.headers, timeout=timeout_s, trust_env=False)
    answer = answer.raise_for_status().json()
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


def engine_tokens(url: str, timeout_s: float = 60.0, *, group: int = 0) -> list[int]:
    """What the engine says greedily after the prompt, NUM_TOKENS tokens."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
        "routed_dp_rank": group,
    }
    answer = httpx.post(f"{url}/generate", json=body, headers=KEY.headers, timeout=timeout_s, trust_env=False)
    return answer.raise_for_status().json()["output_ids"]


def transformers_class(path: Path) -> Any:
    """The class that loads a checkpoint, of a wrapped model with its vision tower."""
    return AutoModelForImageTextToText if wrapper_of(read_hf_config(path)) else AutoModelForCausalLM


@torch.no_grad()
def transformers_logprobs(path: Path) -> torch.Tensor:
    model = transformers_class(path).from_pretrained(path, dtype=torch.float32)
    logits_TV = model(input_ids=torch.tensor([PROMPT])).logits[0, :-1]
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


@torch.no_grad()
def transformers_tokens(path: Path) -> list[int]:
    """What transformers says greedily after the prompt; every token from a pass over all before it."""
    model = transformers_class(path).from_pretrained(path, dtype=torch.float32)
    tokens = list(PROMPT)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


def serves(url: str, path: Path) -> bool:
    """Whether the engine's log-probs are those of the checkpoint, which tells any mixture of two from both."""
    return bool((engine_logprobs(url) - transformers_logprobs(path)).abs().max() < 2e-5)


def answers(url: str, timeout_s: float = 1.0) -> bool:
    """Whether the engine generates at all; one that is paused or gone does not."""
    try:
        engine_logprobs(url, timeout_s)
    except httpx.TransportError:
        return False
    return True
