"""Layers for multi-token prediction: through Megatron and back, computed as transformers does, carried into exports."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small_models import VOCAB, add_mtp_layers, small_model
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from weight_cases import MOE_LAYOUTS_OF_2, MOE_LAYOUTS_OF_4, join, loaded_chunks, round_trip

from slimrl.checkpoints.hf_check import check_checkpoint
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.config.schema import ParallelConfig, Precision
from slimrl.trainer.build import unwrap
from slimrl.trainer.checkpointing.export import export_hf
from slimrl.trainer.weight_source import MegatronWeightSource

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LAYERS = 2
FAMILIES = ["deepseek_v3", "glm4_moe"]
QUICK = {name: MOE_LAYOUTS_OF_2[name] for name in ("tp2_sp_etp2", "pp2", "ep2")}
LENGTH = 37


def model_with_mtp(name: str, folder: Path) -> Path:
    return add_mtp_layers(small_model(name, folder / name), LAYERS)


def test_mtp_layers_return_bit_for_bit_under_layouts_of_two_ranks(tmp_path):
    qwen3_next = add_mtp_layers(small_model("qwen3_next", tmp_path / "qwen3_next"), 1)
    cases = [(model_with_mtp("deepseek_v3", tmp_path), QUICK), (qwen3_next, QUICK)]
    run_ranks(round_trip, 2, cases, True, timeout_s=120)


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "layouts"), [(2, MOE_LAYOUTS_OF_2), (4, MOE_LAYOUTS_OF_4)])
def test_mtp_layers_return_bit_for_bit_under_every_layout(tmp_path, num_ranks, layouts):
    cases = [(model_with_mtp(name, tmp_path), layouts) for name in [*FAMILIES, "moonlight"]]
    run_ranks(round_trip, num_ranks, cases, True, timeout_s=280)


def keep_hidden_states(seen, module, args, output):
    seen.append(output[0][:, 0].clone())


def hidden_states_of_mtp_layers(rank, world_size, port, paths, tokens_T):
    """float32 [T, H] behind each layer of each checkpoint; the last token's are of no use."""
    join(rank, world_size, port)
    bounds = torch.tensor([0, LENGTH], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH
    )
    results = []
    for path in paths:
        chunks, _, _ = loaded_chunks(path, ParallelConfig(), mtp=True)
        chunks[0].eval()
        seen = []
        for layer in unwrap(chunks[0]).mtp.layers:
            layer.register_forward_hook(partial(keep_hidden_states, seen))
        with torch.no_grad():
            chunks[0](tokens_T[None], torch.arange(LENGTH)[None], None, labels=tokens_T[None], packed_seq_params=packed)
        results.append([hidden_TH.numpy() for hidden_TH in seen])
    dist.destroy_process_group()
    return results


def test_mtp_layers_compute_what_transformers_computes(tmp_path):
    paths = [model_with_mtp(name, tmp_path) for name in FAMILIES]
    tokens_T = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5))
    (results,) = run_ranks(hidden_states_of_mtp_layers, 1, paths, tokens_T, timeout_s=90)
    for path, actual in zip(paths, results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        # By these transformers finds the layers in the checkpoint; its own list has those of the released models.
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\.", r"model\.layers\.5\."]
        mtp = MtpModel.from_pretrained(model).float()
        assert len(mtp.layers) == len(actual) == LAYERS
        with torch.no_grad():
            hidden_1TH = model.model(tokens_T[None]).last_hidden_state
            for index, layer in enumerate(mtp.layers):
                embedded_1TH = model.model.embed_tokens(tokens_T[None, index + 1 :])
                hidden_1TH = hidden_1TH[:, : embedded_1TH.shape[1]]
                positions_1T = torch.arange(embedded_1TH.shape[1])[None]
                rotary = model.model.rotary_emb(embedded_1TH, positions_1T)
                hidden_1TH = layer(embedded_1TH, hidden_1TH, rotary, None, positions_1T, None)
                difference = torch.from_numpy(actual[index])[: hidden_1TH.shape[1]] - hidden_1TH[0]
                assert difference.abs().max() < 1e-4, (path.name, index, difference.abs().max())


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
