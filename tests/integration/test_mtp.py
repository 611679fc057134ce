"""Layers for multi-token prediction: through Megatron and back, computed as transformers does, carried into exports."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small_models import VOCAB, add_mtp_layers, mtp_key, small_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from weight_cases import (
    MOE_LAYOUTS_OF_2,
    MOE_LAYOUTS_OF_4,
    change_layout,
    join,
    loaded_chunks,
    round_trip,
    trainer_config,
)

from slimrl.algorithms.objective import cross_entropy
from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.config.schema.precision import Precision
from slimrl.config.schema.trainer import MtpConfig, OptimizerConfig, ParallelConfig
from slimrl.data.packing import pack, pack_for
from slimrl.data.trajectory import Segment
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import unwrap
from slimrl.trainer.checkpointing.export import export_hf
from slimrl.trainer.micro_batch_runner import MicroBatchRunner
from slimrl.trainer.mtp import MtpLoss
from slimrl.trainer.optimizer import Optimizer
from slimrl.trainer.weight_source import MegatronWeightSource
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LAYERS = 2
FAMILIES = ["deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "hy_v3"]
GATED = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
INDEXED = ["glm_moe_dsa", "glm_moe_dsa_shared"]
"""transformers' own MtpModel cannot compute the layers of GLM-5, which return a tuple."""
QUICK = {name: MOE_LAYOUTS_OF_2[name] for name in ("tp2_sp_etp2", "pp2", "ep2")}
TEMPERATURE, WEIGHT = 0.7, 0.3


def model_with_mtp(name: str, folder: Path) -> Path:
    return add_mtp_layers(small_model(name, folder / name), LAYERS)


def test_mtp_layers_return_bit_for_bit_under_layouts_of_two_ranks(tmp_path):
    gated = [add_mtp_layers(small_model(name, tmp_path / name), 1) for name in ("qwen3_next", "qwen3_5_moe")]
    cases = [(path, QUICK) for path in (model_with_mtp("deepseek_v3", tmp_path), *gated)]
    run_ranks(round_trip, 2, cases, True, timeout_s=120)


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "layouts"), [(2, MOE_LAYOUTS_OF_2), (4, MOE_LAYOUTS_OF_4)])
def test_mtp_layers_return_bit_for_bit_under_every_layout(tmp_path, num_ranks, layouts):
    cases = [(model_with_mtp(name, tmp_path), layouts) for name in [*FAMILIES, "moonlight"]]
    run_ranks(round_trip, num_ranks, cases, True, timeout_s=280)


def sequences():
    """Random tokens of several lengths, with loss masks."""
    rng = np.random.default_rng(5)
    return [
        replace(
            Segment.not_sampled(rng.integers(0, VOCAB, length), rng.random(length) < 0.6),
            rollout_logprobs=rng.normal(-4, 0.1, length).astype(np.float32),
        )
        for length in (37, 2, 23, 3)
    ]


def loss_and_gradients(rank, world_size, port, paths, segments, layers=LAYERS):
    """For each checkpoint: the loss of its MTP layers on one micro-batch and its gradient by name of the weight."""
    join(rank, world_size, port)
    layout = change_layout(ParallelConfig())
    results = []
    for path in paths:
        trainer = trainer_config(ParallelConfig())
        trainer = replace(trainer, optimizer=OptimizerConfig(lr=1e-3, clip_grad=0, distributed=False))
        chunks, _, _ = loaded_chunks(path, ParallelConfig(), mtp=True)
        mtp = MtpLoss(layers, WEIGHT)
        runner = MicroBatchRunner(
            chunks, Optimizer(trainer, chunks, 1), layout, vocab_size=VOCAB, chunk_tokens=16, mtp=mtp
        )
        (batches,) = pack(
            [[one] for one in segments], np.ones(4, np.float32), budget_tokens=80, alignment=4, data_parallel=1
        )
        result = runner.train_update(batches, cross_entropy, denominator=1.0, temperature=TEMPERATURE)
        gradients = {
            name: parameter.main_grad.numpy().copy()
            for name, parameter in unwrap(chunks[0]).mtp.named_parameters()
            if parameter.requires_grad
        }
        results.append((result.sums["mtp_loss"], gradients))
    dist.destroy_process_group()
    return results


def expected_loss(model, mtp, segments):
    """Mean over layers of the mean of -log p over each layer's targets, differentiable; transformers' layers."""
    sums, counts = [0.0] * len(mtp.layers), [0] * len(mtp.layers)
    for segment in segments:
        tokens_T, mask_T = torch.from_numpy(segment.tokens), torch.from_numpy(segment.loss_mask)
        with torch.no_grad():
            hidden_1TH = model.model(tokens_T[None]).last_hidden_state
        for index, layer in enumerate(mtp.layers):
            ahead = index + 1
            length = len(tokens_T) - ahead - 1
            if length <= 0:
                break
            embedded_1TH = model.model.embed_tokens(tokens_T[None, ahead:-1]).detach()
            positions_1T = torch.arange(length)[None]
            rotary = model.model.rotary_emb(embedded_1TH, positions_1T)
            mask_11TT = torch.full((1, 1, length, length), -torch.inf).triu(1)
            hidden_1TH = layer(embedded_1TH, hidden_1TH[:, :length], rotary, mask_11TT, positions_1T, None)
            log_p_TV = (model.lm_head(hidden_1TH)[0] / TEMPERATURE).log_softmax(-1)
            log_p_T = log_p_TV.gather(1, tokens_T[ahead + 1 :, None])[:, 0]
            sums[index] -= log_p_T[mask_T[ahead + 1 :]].sum()
            counts[index] += int(mask_T[ahead + 1 :].sum())
    return sum(total / count for total, count in zip(sums, counts, strict=True)) / len(sums)


MEGATRON_NAMES = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "post_norm.weight": "final_layernorm.weight",
    "mtp_block.self_attn.o_proj.weight": "mtp_model_layer.self_attention.linear_proj.weight",
    "mtp_block.mlp.gate.weight": "mtp_model_layer.mlp.router.weight",
}
"""Weights of a layer that both sides hold in one shape: transformers' name -> Megatron's."""


def test_mtp_layers_have_the_loss_and_the_gradient_of_transformers_layers(tmp_path):
    paths = [model_with_mtp(name, tmp_path) for name in FAMILIES]
    (results,) = run_ranks(loss_and_gradients, 1, paths, sequences(), timeout_s=90)
    for path, (loss, gradients) in zip(paths, results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        # By these transformers finds the layers in the checkpoint; its own list has those of the released models.
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\.", r"model\.layers\.5\."]
        if path.name in ("glm4_moe_lite", "hy_v3", "deepseek_v32"):
            # Their configs in transformers know neither how many there are nor of which kind.
            model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = LAYERS, ["sparse"] * LAYERS
            if hasattr(model.config, "index_topk"):
                model.config.mtp_layer_types = ["indexed_attention"] * LAYERS
        if path.name == "hy_v3":
            # Nor does transformers know what these layers of Hy3 call their last norm.
            tensors = load_file(path / "model.safetensors")
            named = {name.replace("final_layernorm", "shared_head.norm"): value for name, value in tensors.items()}
            save_file(named, path / "model.safetensors", metadata={"format": "pt"})
        mtp = MtpModel.from_pretrained(model).float()
        assert len(mtp.layers) == LAYERS
        expected = expected_loss(model, mtp, sequences())
        assert loss == pytest.approx(float(expected), abs=1e-5), path.name
        (WEIGHT * expected).backward()
        for index, layer in enumerate(mtp.layers):
            for name, megatron in MEGATRON_NAMES.items():
                wanted = layer.get_parameter(name).grad
                actual = torch.from_numpy(gradients[f"layers.{index}.{megatron}"])
                assert (actual - wanted).norm() <= 1e-4 * wanted.norm(), (path.name, index, name)


class MtpLayerOfParts(nn.Module):
    """A layer for multi-token prediction that transformers lacks or cannot compute, of its parts.

    Args:
        block: a decoder layer of transformers' model with the weights of the layer's own.
        names: of the other weights in the checkpoint, `eh_proj`, `enorm`, `hnorm` and `post_norm`.
    """

    def __init__(self, block: nn.Module, hf_config: dict, tensors: dict[str, torch.Tensor], names: dict[str, str]):
        super().__init__()
        self.mtp_block, hidden = block, hf_config["hidden_size"]
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        norm = type(block.input_layernorm)
        self.enorm, self.hnorm, self.post_norm = (norm(hidden, eps=hf_config["rms_norm_eps"]) for _ in range(3))
        for name, stored in names.items():
            self.get_submodule(name).weight.data = tensors[stored]

    def forward(self, embedded_1TH, hidden_1TH, rotary, mask, positions_1T, cache):
        joined = torch.cat([self.enorm(embedded_1TH), self.hnorm(hidden_1TH)], dim=-1)
        computed = self.mtp_block(self.eh_proj(joined), position_embeddings=rotary, attention_mask=mask)
        # GLM-5's decoder layer also returns which keys it chose.
        return self.post_norm(computed[0] if isinstance(computed, tuple) else computed)


def longer_model(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> nn.Module:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def gated_layers(path: Path, folder: Path) -> list[MtpLayerOfParts]:
    """The one of Qwen3-Next and Qwen3.5, whose block is a decoder layer with attention under the name `mtp`."""
    config, tensors = read_hf_config(path), load_file(path / "model.safetensors")
    last, kinds = config["num_hidden_layers"], [*config["layer_types"], "full_attention"]
    longer = {**config, "num_hidden_layers": last + 1, "layer_types": kinds, mtp_key(config): 0}
    moved = {name.replace("mtp.layers.0.", f"model.layers.{last}."): tensor for name, tensor in tensors.items()}
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
    stored = {name: f"mtp.{each}.weight" for name, each in names.items()}
    block = longer_model(folder, longer, moved).model.layers[last]
    return [MtpLayerOfParts(block, config, tensors, stored)]


def indexed_layers(path: Path, folder: Path) -> list[MtpLayerOfParts]:
    """Those of GLM-5, whose blocks are numbered after the decoder layers, each with an indexer and experts."""
    config, tensors = read_hf_config(path), load_file(path / "model.safetensors")
    last, count = config["num_hidden_layers"], config[mtp_key(config)]
    longer = {**config, "num_hidden_layers": last + count, mtp_key(config): 0}
    more = {"indexer_types": "full", "mlp_layer_types": "sparse", "layer_types": config["layer_types"][-1]}
    longer |= {key: [*config[key], *[kind] * count] for key, kind in more.items() if config.get(key)}
    model, layers = longer_model(folder, longer, tensors), []
    for index in range(last, last + count):
        names = {name: f"model.layers.{index}.{name}.weight" for name in ("eh_proj", "enorm", "hnorm")}
        names["post_norm"] = f"model.layers.{index}.shared_head.norm.weight"
        layers.append(MtpLayerOfParts(model.model.layers[index], config, tensors, names))
    return layers


@pytest.mark.parametrize(
    ("names", "count", "layers_of"),
    [(GATED, 1, gated_layers), (INDEXED[:1], LAYERS, indexed_layers), (INDEXED[1:], 1, indexed_layers)],
    ids=["gated", "indexed", "shared_indexers"],
)
def test_mtp_layers_have_the_loss_and_the_gradient_of_transformers_parts(tmp_path, names, count, layers_of):
    paths = [add_mtp_layers(small_model(name, tmp_path / name), count) for name in names]
    (results,) = run_ranks(loss_and_gradients, 1, paths, sequences(), count, timeout_s=90)
    for path, (loss, gradients) in zip(paths, results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        layers = layers_of(path, tmp_path / f"{path.name}_longer")
        expected = expected_loss(model, SimpleNamespace(layers=layers), sequences())
        assert loss == pytest.approx(float(expected.detach()), abs=1e-5), path.name
        (WEIGHT * expected).backward()
        for index, layer in enumerate(layers):
            held = dict(layer.named_parameters())
            for name, megatron in MEGATRON_NAMES.items():
                if name in held:
                    actual = torch.from_numpy(gradients[f"layers.{index}.{megatron}"])
                    assert (actual - held[name].grad).norm() <= 1e-4 * held[name].grad.norm(), (path.name, index, name)
            assert (path.name == "qwen3_5") == ("mtp_block.mlp.gate.weight" not in held)


def changed_export(rank, world_size, port, path, out):
    """An export of a model that training, which leaves the MTP layers out, has changed everywhere."""
    join(rank, world_size, port)
    chunks, family, hf_config = loaded_chunks(path, ParallelConfig(expert=2), Precision.bf16)
    with torch.no_grad():
        for parameter in unwrap(chunks[0]).parameters():
            parameter.mul_(1.5)
    export_hf(MegatronWeightSource(chunks, family, hf_config, dtype="bfloat16"), path, out)
    dist.destroy_process_group()


def test_an_export_has_every_tensor_of_the_model_and_the_mtp_layers_as_they_were(tmp_path):
    path = model_with_mtp("glm4_moe", tmp_path)
    run_ranks(changed_export, 2, path, tmp_path / "export", timeout_s=90)
    before = load_file(path / "model.safetensors")
    check_checkpoint(tmp_path / "export")
    with SafetensorsFolder(tmp_path / "export") as folder:
        after = {
            name: folder.read(name, tuple(slice(0, size) for size in spec.shape)) for name, spec in folder.specs.items()
        }
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype == (torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)
        as_before = before[name].to(tensor.dtype)
        is_copy = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        is_mtp = name.startswith(("model.layers.4.", "model.layers.5.")) and not is_copy
        assert torch.equal(tensor, as_before) == (is_mtp or name.endswith("e_score_correction_bias")), name
    for index in (4, 5):
        assert torch.equal(after[f"model.layers.{index}.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert torch.equal(after[f"model.layers.{index}.shared_head.head.weight"], after["lm_head.weight"])


def trained_and_resumed(rank, world_size, port, path, folder):
    """Losses of two updates and of the second one again after a checkpoint, and the names that a resync sends."""
    trainer = replace(
        trainer_config(ParallelConfig(pipeline=2)), mtp=MtpConfig(train=True), num_ranks=2, precision=Precision.bf16
    )
    worker = TrainerWorker(
        trainer, path, seed=1, rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=4,
    )  # fmt: skip
    worker.load_hf()
    segments, advantages_N = [[one] for one in sequences()], np.ones(4, np.float32)
    batches = pack_for(trainer, worker.layout, segments, advantages_N)[0]

    def update():
        return worker.runner.train_update(batches, cross_entropy, denominator=20.0, temperature=1.0).sums

    losses = [update()]
    worker.save_checkpoint(folder / "checkpoint")
    losses.append(update())
    worker.export_hf(folder / "export")
    worker.load_checkpoint(folder / "checkpoint")
    losses.append(update())
    worker.export_hf(folder / "resumed")
    sent = [spec.name for spec in worker.weight_source().layout()]
    worker.close()
    return losses, sent


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_trained_mtp_layers_are_exported_and_resumed_and_not_sent_to_engines(tmp_path):
    path = model_with_mtp("glm4_moe", tmp_path)
    losses, sent = run_ranks(trained_and_resumed, 2, path, tmp_path, timeout_s=280)[0]
    before = load_file(path / "model.safetensors")
    after, resumed = (exported(tmp_path / name) for name in ("export", "resumed"))
    check_checkpoint(tmp_path / "export")
    assert losses[1] == losses[2]
    assert losses[1]["mtp_loss"] < losses[0]["mtp_loss"]
    assert after.keys() == resumed.keys() == before.keys()
    assert all(torch.equal(after[name], resumed[name]) for name in after)
    mtp = [name for name in before if name.startswith(("model.layers.4.", "model.layers.5."))]
    unchanged = [name for name in mtp if torch.equal(after[name].float(), before[name].bfloat16().float())]
    # Experts that no token reached stay as they were.
    assert all(name.endswith("e_score_correction_bias") or ".experts." in name for name in unchanged), unchanged
    assert len(unchanged) < len(mtp) / 2
    for index in (4, 5):
        assert torch.equal(after[f"model.layers.{index}.embed_tokens.weight"], after["model.embed_tokens.weight"])
        assert torch.equal(after[f"model.layers.{index}.shared_head.head.weight"], after["lm_head.weight"])
    assert set(sent) == set(before) - set(mtp)


def test_a_checkpoint_may_lack_its_mtp_layers_but_not_some_of_their_tensors(tmp_path):
    path = model_with_mtp("deepseek_v3", tmp_path)
    tensors = load_file(path / "model.safetensors")
    copies = [name for name in tensors if name.endswith(("4.embed_tokens.weight", "4.shared_head.head.weight"))]
    for name in copies:
        del tensors[name]
    save_file(tensors, path / "model.safetensors")
    check_checkpoint(path)
    del tensors["model.layers.5.eh_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.5\.eh_proj\.weight: missing"):
        check_checkpoint(path)
    trunk = {
        name: tensor for name, tensor in tensors.items() if not name.startswith(("model.layers.4", "model.layers.5"))
    }
    save_file(trunk, path / "model.safetensors")
    check_checkpoint(path)
