"""Converts a GGUF file to a Hugging Face checkpoint, dequantised.

transformers does the same in two calls, if the whole model fits into memory: `from_pretrained(gguf_file=...)` and
`save_pretrained`. But the second refuses: a model read from GGUF keeps a quantizer that says it cannot be saved, even
when all weights are plain by then. Here one parameter at a time is read, named as in published checkpoints and written.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from slimrl_tools.convert.conversion import Say
from slimrl_tools.convert.gguf_file import GgufModel, open_gguf
from slimrl_tools.convert.gguf_tokenizer import gguf_tokenizer
from slimrl_tools.derive.rewrite import Rewrite
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from slimrl.data.model_weights import TensorSpec
from slimrl.models.hf_config import plain_config


def gguf_to_hf(file: Path, dtype: str | None, say: Say = print) -> Rewrite:
    """What to write. Holds one parameter at a time; all matrices of a layer's experts are one in transformers.

    Args:
        dtype: as torch prints it; None keeps that of plain tensors, and gives float32 to quantised ones.
        say: prints what was quantised, and what transformers leaves out.

    Raises:
        ValueError: the file is refused; see `open_gguf` and `gguf_tokenizer`.
    """
    source = open_gguf(file)
    tokenizer, note = gguf_tokenizer(file, dict(source.metadata))
    notes = [f"the weights are those of the quantised file, dequantised: {source.quantization()}"]
    if unread := source.unread_keys():
        notes.append(f"transformers does not read these of its keys: {', '.join(unread)}")
    notes += [note] if note else []
    for line in notes:
        say(f"{file.name}: {line}")
    parameters = _parameters(source, dtype)
    return Rewrite(
        command="convert gguf-to-hf",
        sources=[file],
        specs=[spec for specs in parameters.values() for spec in specs],
        produce=lambda specs: _produce(source, parameters, specs),
        config=_config(source, parameters),
        options={"dtype": dtype},
        add_files=lambda folder: _add_files(folder, source, tokenizer, notes),
    )


def _parameters(source: GgufModel, dtype: str | None) -> dict[str, list[TensorSpec]]:
    """Parameter -> the tensors of the checkpoint that it becomes."""
    in_float32 = source.model._get_dtype_plan(torch.float32)
    parameters = {}
    for name, empty in source.model.state_dict().items():
        if name in source.sources:
            fixed = any(module in name for module in in_float32)
            written = "float32" if fixed else dtype or str(source.dtype(name)).removeprefix("torch.")
            parameters[name] = [
                TensorSpec(name=published, shape=tuple(tensor.shape), dtype=written)
                for published, tensor in _published(source, name, empty).items()
            ]
    return parameters


def _published(source: GgufModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A parameter as published checkpoints of its family have it: an expert's matrices apart, for example."""
    made: dict[str, Tensor] = revert_weight_conversion(source.model, {name: tensor})
    return made


def _produce(
    source: GgufModel, parameters: dict[str, list[TensorSpec]], specs: Sequence[TensorSpec]
) -> Iterator[tuple[str, Tensor]]:
    parameter_of = {spec.name: name for name, made in parameters.items() for spec in made}
    held: dict[str, Tensor] = {}
    for spec in specs:
        if spec.name not in held:
            held.clear()
            name = parameter_of[spec.name]
            held = _published(source, name, source.read(name))
        yield spec.name, held.pop(spec.name)


def _config(source: GgufModel, parameters: dict[str, list[TensorSpec]]) -> dict[str, Any]:
    """config.json with the dtype of the most elements."""
    sizes: dict[str, int] = {}
    for spec in (spec for specs in parameters.values() for spec in specs):
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + torch.Size(spec.shape).numel()
    config = json.loads(source.model.config.to_json_string())
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    config["architectures"] = [type(source.model).__name__]
    return plain_config(config, max(sizes, key=lambda dtype: sizes[dtype]))


def _add_files(folder: Path, source: GgufModel, tokenizer: PreTrainedTokenizerFast, notes: Sequence[str]) -> None:
    """Tokenizer with chat template, generation config, and a model card that says what the weights are."""
    tokenizer.save_pretrained(folder)
    assert source.model.generation_config is not None
    source.model.generation_config.save_pretrained(folder)
    licence = source.metadata.get("general.license")
    front = f"---\nlicense: {licence}\n---\n\n" if licence else ""
    name = source.metadata.get("general.name", source.path.stem)
    said = "\n".join(f"- {line}" for line in notes)
    (folder / "README.md").write_text(
        f"{front}# {name}\n\nMade from `{source.path.name}` by `slimrl-tools convert gguf-to-hf`.\n\n{said}\n"
    )
