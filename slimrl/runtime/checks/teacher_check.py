"""Checks that the teacher reads tokens as the policy does, before anything starts.

Log-probs of two models can be compared only if each id means the same to both. Every id of the policy's tokenizer must
be the same token in the teacher's, which may have more. A server that somebody else runs is asked over HTTP:

1. whether it is healthy;
2. for the ids of a sample text, which must be the policy's, and for the texts of the policy's added tokens;
3. for the log-prob of the last id of the policy's vocabulary, which SGLang refuses beyond the teacher's.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from slimrl.agent.chat.tokenizer import load_tokenizer
from slimrl.base.environment_key import environment_key
from slimrl.config.load import LoadedRecipe, is_needed
from slimrl.config.problems import Problem
from slimrl.config.schema.model import TeacherConfig
from slimrl.engines.engine_key import EngineKey
from slimrl.models.hf_config import read_hf_config

TIMEOUT_S = 30.0
"""Deadline for each answer of a server."""
SAMPLE = "def f(x):\n    return x**2 + 3.14159  # déjà vu, Привет, 你好, こんにちは 😀\n\nThe answer is 1234567890."
_SHOWN = 3


def teacher_problems(loaded: LoadedRecipe, *, servers: bool = True) -> list[Problem]:
    """Problems of the teacher's vocabulary and of its servers; none without a teacher.

    Args:
        servers: also ask the servers of `teacher.urls`.
    """
    teacher = loaded.recipe.teacher
    if not is_needed("teacher", loaded.command) or not teacher.is_given:
        return []
    policy, trust = Path(loaded.recipe.model.path), loaded.recipe.model.trust_remote_code
    try:
        tokenizer = load_tokenizer(policy, trust_remote_code=trust)
    except ValueError:
        # The check of the task names it.
        return []
    if teacher.path:
        try:
            its = load_tokenizer(Path(teacher.path), trust_remote_code=trust)
        except ValueError as error:
            return [loaded.problem("teacher.path", str(error))]
        reason = other_vocabulary(tokenizer, its)
        return [loaded.problem("teacher.path", f"{teacher.path}: {reason}")] if reason else []
    if not servers:
        return []
    vocab_size = int(read_hf_config(policy)["vocab_size"])
    try:
        key = key_of_others(teacher)
    except ValueError as error:
        return [loaded.problem("teacher.api_key_env", f"{error}.")]
    asked = ((url, why_no_teacher(url, key, tokenizer, vocab_size)) for url in teacher.urls)
    return [loaded.problem("teacher.urls", f"{url}: {reason}") for url, reason in asked if reason]


def other_vocabulary(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str:
    """How the ids of the policy's tokens differ in the teacher's tokenizer; empty if they do not."""
    theirs = {number: token for token, number in teacher.get_vocab().items()}
    mine = sorted((number, token) for token, number in policy.get_vocab().items())
    wrong = [(number, token, theirs.get(number)) for number, token in mine if theirs.get(number) != token]
    if not wrong:
        return ""
    named = (
        f"{number} is {token!r}, there {'no token' if other is None else repr(other)}" for number, token, other in wrong
    )
    shown = [text for text, _ in zip(named, range(_SHOWN), strict=False)]
    return (
        f"the teacher must read tokens as the policy does, but {len(wrong):,} of the policy's {len(mine):,} tokens are "
        f"others in its tokenizer: {'; '.join(shown)}."
    )


def key_of_others(teacher: TeacherConfig) -> EngineKey | None:
    """The key of the servers of `teacher.urls`; None where they have none.

    Raises:
        ValueError: see environment_key.
    """
    return EngineKey(environment_key(teacher.api_key_env)) if teacher.api_key_env else None


def why_no_teacher(url: str, key: EngineKey | None, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str:
    """Why the server cannot score tokens of this tokenizer; empty if it can."""
    headers = {} if key is None else key.headers
    try:
        with httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_S, trust_env=False) as client:
            return next(_server_faults(client, tokenizer, vocab_size), "")
    except httpx.HTTPStatusError as error:
        if error.response.status_code not in (401, 403):
            return f"no teacher answers there: {error}".rstrip() + "."
        wrong = "refuses this key" if key is not None else "asks for a key"
        return f"{wrong}: name the environment variable that holds its --api-key in teacher.api_key_env."
    except httpx.HTTPError as error:
        return f"no teacher answers there: {type(error).__name__} {error}".rstrip() + "."
    except (KeyError, TypeError, ValueError) as error:
        return f"does not answer as SGLang does: {error!r}."


def _server_faults(client: httpx.Client, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Iterator[str]:
    if (status := client.get("/health").status_code) != 200:
        yield f"its /health says {status}."
    text = _answer(client, "/tokenize", {"prompt": SAMPLE, "add_special_tokens": False})["tokens"]
    expected = tokenizer.encode(SAMPLE, add_special_tokens=False)
    if text != expected:
        yield f"has another tokenizer: a sample text is {expected[:8]} ... to the policy and {text[:8]} ... there."
    added = sorted((number, str(token)) for number, token in tokenizer.added_tokens_decoder.items())
    body = {"tokens": [[number] for number, _ in added], "skip_special_tokens": False}
    said = _answer(client, "/detokenize", body)["text"] if added else []
    for (number, token), other in zip(added, said, strict=True):
        if token != other:
            yield f"has another tokenizer: token {number} is {token!r} to the policy and {other!r} there."
    response = client.post("/generate", json=_probe(expected[:2], vocab_size - 1))
    if response.status_code == 400 and "out-of-vocabulary" in response.text:
        yield f"its vocabulary is smaller than the policy's {vocab_size}: {response.text[:200]}"
    response.raise_for_status()


def _probe(tokens: list[int], last: int) -> dict[str, Any]:
    return {
        "input_ids": tokens,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "token_ids_logprob": [last],
    }


def _answer(client: httpx.Client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(route, json=body)
    response.raise_for_status()
    return response.json()
