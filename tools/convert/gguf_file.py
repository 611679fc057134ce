"""Reads GGUF, llama.cpp's format of one file with a quantised model, one parameter at a time.

transformers knows what a file means (`transformers.modeling_gguf_pytorch_utils`), but reads all of it at once. Here
its parts are used for one parameter after the other:

1. `load_gguf_checkpoint` makes the configuration. A model of it on the meta device has each parameter's name and shape.
2. `get_gguf_hf_weights_map` says which tensors of the file make which parameter.
3. The `gguf` package, llama.cpp's own, dequantises a tensor. A TensorProcessor undoes what llama.cpp changed in it,
   such as the order of the rows of Llama's query and key.

`from_pretrained` fills a parameter that the file lacks with random numbers, and drops what the model has no place for.
Both are refused here.
"""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor, dequantize
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_SUPPORTED_ARCHITECTURES,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from slimrl.observability.units import counted

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
"""Types of tensors that are not quantised"""

MAX_LISTED = 3
"""Tensors that an error names."""


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """A file that transformers can read whole."""

    path: Path
    metadata: Mapping[str, Any]
    """Its keys; of an array of texts only the length."""
    model: PreTrainedModel
    """On the meta device: names and shapes without values."""
    sources: Mapping[str, Sequence[ReaderTensor]]
    """Parameter -> the tensors of the file that make it; none of a tied parameter."""
    _mapping: Mapping[str, str]
    _processor: TensorProcessor

    def read(self, parameter: str) -> Tensor:
        """A parameter, dequantised, in float32.

        Raises:
            ValueError: it has another shape than its model's, or a value that is not finite.
        """
        made: dict[str, Any] = {"tensors": {}}
        for stored in self.sources[parameter]:
            result = self._processor.process(
                weights=dequantize(stored.data, stored.tensor_type),
                name=stored.name,
                tensor_key_mapping=self._mapping,
                parsed_parameters=made,
            )
            if result.name is not None:
                # A plain tensor is still a view of the file, which torch would let one write to.
                weights = np.require(result.weights, requirements=["C", "W"])
                made["tensors"][parameter] = torch.from_numpy(weights)
        (tensor,) = made["tensors"].values()
        shape = self.model.state_dict()[parameter].shape
        if tensor.shape != shape:
            raise ValueError(
                f"{self.path}: {self._names(parameter)} makes {list(tensor.shape)}, and {parameter} has {list(shape)}"
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{self.path}: {self._names(parameter)} has values that are not finite: it is damaged")
        return tensor

    def dtype(self, parameter: str) -> torch.dtype:
        """The dtype in which a parameter is stored; float32 if it is quantised."""
        kinds = (PLAIN.get(stored.tensor_type, torch.float32) for stored in self.sources[parameter])
        return reduce(torch.promote_types, kinds)

    def check_shapes(self) -> None:
        """Raises ValueError if a tensor does not have its parameter's number of elements."""
        sizes = self.model.state_dict()
        for parameter, stored in self.sources.items():
            had, shape = sum(tensor.n_elements for tensor in stored), sizes[parameter].shape
            if had != shape.numel():
                raise ValueError(
                    f"{self.path}: {self._names(parameter)} has {had:,} elements, and {parameter} of the model that "
                    f"transformers makes of the file's keys {shape.numel():,}, {list(shape)}: a size is not among "
                    "those keys"
                )

    def quantization(self) -> str:
        """The types of the file's tensors, the commonest first: `Q4_1 (211 tensors), F32 (61 tensors)`."""
        kinds = Counter(stored.tensor_type.name for tensors in self.sources.values() for stored in tensors)
        return ", ".join(f"{name} ({counted(count, 'tensor')})" for name, count in kinds.most_common())

    def unread_keys(self) -> list[str]:
        """Keys on the model that transformers does not read."""
        prefix = f"{self.metadata['general.architecture']}."
        read: Any = GGUF_CONFIG_MAPPING.get(self.model.config.model_type) or GGUF_CONFIG_MAPPING[prefix[:-1]]
        return [key for key in self.metadata if key.startswith(prefix) and key.removeprefix(prefix) not in read]

    def _names(self, parameter: str) -> str:
        return " and ".join(stored.name for stored in self.sources[parameter])


def open_gguf(path: Path) -> GgufModel:
    """Read the header of a file and check that a whole model comes of it.

    Raises:
        ValueError: no file, no GGUF, damaged or cut off, one part of several, or a model that transformers does not
            read whole.
    """
    if not path.is_file():
        raise ValueError(f"{path}: {'a folder' if path.is_dir() else 'no such file'}; GGUF is one file")
    metadata = _metadata(path)
    tensors = _tensors(path)
    model = _model(path, metadata["general.architecture"])
    processor = TENSOR_PROCESSORS.get(metadata["general.architecture"], TensorProcessor)(model.config.to_dict())
    try:
        mapping = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError as error:
        raise ValueError(f"{path}: transformers cannot name the tensors of this architecture: {error}") from error
    read = GgufModel(
        path=path,
        metadata=metadata,
        model=model,
        sources=_sources(path, model, mapping, tensors),
        _mapping=mapping,
        _processor=processor,
    )
    read.check_shapes()
    if any(key.endswith(".rope.scaling.type") and metadata[key] != "none" for key in read.unread_keys()):
        raise ValueError(f"{path}: its positions are scaled (rope.scaling), which transformers does not read from GGUF")
    return read


def _metadata(path: Path) -> dict[str, Any]:
    try:
        metadata, _ = read_gguf_metadata(str(path))
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: the header is damaged or cut off: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(str(path)).strip()}") from error
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(
            f"{path}: part {metadata.get('split.no', 0) + 1} of a model in {parts} files; merge them first, with "
            "llama.cpp's `llama-gguf-split --merge FIRST_PART OUT`"
        )
    return metadata


def _tensors(path: Path) -> list[ReaderTensor]:
    # After _metadata: the reader does not bound the counts of a damaged header.
    try:
        return list(GGUFReader(path).tensors)
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"{path}: the file is damaged, or ends before its last tensor: {error}") from error


def _model(path: Path, architecture: str) -> PreTrainedModel:
    """The model on the meta device."""
    try:
        config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    except ValueError as error:
        raise ValueError(
            f"{path}: {error} transformers reads {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}"
        ) from error
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ValueError(f"{path}: {architecture} is no causal language model in transformers: {error}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def _sources(
    path: Path, model: PreTrainedModel, mapping: Mapping[str, str], tensors: Sequence[ReaderTensor]
) -> dict[str, list[ReaderTensor]]:
    """Parameter -> its tensors, in the model's order."""
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    sources: dict[str, list[ReaderTensor]] = {name: [] for name in model.state_dict() if name not in tied}
    # The name of a parameter of all experts has no suffix.
    names = [stored.name for stored in tensors]
    targets = {name: mapping.get(name) or mapping.get(name.removesuffix(".weight")) for name in names}
    if unplaced := [name for name, target in targets.items() if target not in sources]:
        raise ValueError(
            f"{path}: {model.config.model_type} of transformers has no place for {_listed(unplaced)}. Without them it "
            "would be another model"
        )
    for stored in tensors:
        sources[targets[stored.name] or ""].append(stored)
    if missing := [name for name, found in sources.items() if not found]:
        raise ValueError(f"{path}: no tensor of the file makes {_listed(missing)} of transformers' model")
    return sources


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return ", ".join([*names[:MAX_LISTED], *more])
