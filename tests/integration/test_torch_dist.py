"""torch_dist checkpoints written and read without Megatron's own code for it, against what that code does."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loaded_models import chunks_of, load_hf, same_weights, start
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from ranks import run_ranks
from slimrl_tools.convert.hf_to_megatron import hf_to_megatron
from slimrl_tools.convert.megatron_to_hf import megatron_to_hf
from slimrl_tools.convert.options import Options
from slimrl_tools.torch_dist import TorchDistCheckpoint
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.toy.toy_configs import ToySize
from small_models import small_model
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from trainer_cases import packed_batches, token_cross_entropy, trainer_config

from slimrl.checkpoints.hf_checkpoint import open_hf_checkpoint
from slimrl.checkpoints.safetensors_folder import SafetensorsFolder
from slimrl.checkpoints.torch_dist.chunks import SHARDING
from slimrl.checkpoints.torch_dist.torch_chunk import read_chunk
from slimrl.config.schema.trainer import ParallelConfig
from slimrl.models.hf_config import read_hf_config
from slimrl.trainer.build import unwrap
from slimrl.trainer.worker import TrainerWorker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

LAYOUTS_OF_2 = {
    "tp2": ParallelConfig(tensor=2, sequence=True),
    "pp2": ParallelConfig(pipeline=2),
    "ep2": ParallelConfig(expert=2),
    "etp2": ParallelConfig(expert_tensor=2),
}
LAYOUTS_OF_4 = {
    "tp2_ep2_etp1": ParallelConfig(tensor=2, sequence=True, expert=2),
    "tp2_pp2_etp2": ParallelConfig(tensor=2, sequence=True, pipeline=2, expert_tensor=2),
    "tp2_pp2_vpp2_ep2": ParallelConfig(tensor=2, sequence=True, pipeline=2, virtual_pipeline=2, expert=2),
    "tp4": ParallelConfig(tensor=4, sequence=True),
}


def layouts_of_4(name: str) -> dict[str, ParallelConfig]:
    """Those that a model allows: tied ones have no experts, and megatron-core shards no experts that have biases."""
    if name.endswith("_tied"):
        return {"tp2_pp2": ParallelConfig(tensor=2, pipeline=2)}
    return {key: each for key, each in LAYOUTS_OF_4.items() if each.expert_tensor == 1 or name != "gpt_oss"}


OPTIONS = Options()


def save_live(rank, world_size, port, path, layouts, out, sharding, mtp):
    """Megatron's own checkpoints of a model under several layouts."""
    start(rank, world_size, port)
    for name, parallel in layouts.items():
        chunks = chunks_of(path, parallel, mtp=mtp)
        load_hf(chunks, path)
        metadata = {**sharding, "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
        state = {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
        if rank == 0:
            (out / name).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, str(out / name), content_metadata=dict(sharding))
    dist.destroy_process_group()


def contents(path: Path):
    """What a folder holds: (key, offset) -> tensor, key -> shape, and the keys of objects; by torch's own reader."""
    metadata = FileSystemReader(path).read_metadata()
    blocks, shapes, objects = {}, {}, set()
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            shapes[key] = tuple(stored.size)
        else:
            objects.add(key)
    for index, place in metadata.storage_data.items():
        if index.fqn in shapes:
            blocks[index.fqn, tuple(index.offset)] = read_chunk(path, place)
    return blocks, shapes, objects


@pytest.mark.parametrize(
    ("family", "parallel", "mtp"),
    [
        ("qwen3_moe", ParallelConfig(tensor=2, sequence=True, expert_tensor=2), 0),
        pytest.param("deepseek_v3", ParallelConfig(tensor=2, sequence=True), 1, marks=pytest.mark.full),
        pytest.param("glm4_moe", ParallelConfig(expert_tensor=2), 1, marks=pytest.mark.full),
        pytest.param("qwen3", ParallelConfig(tensor=2, sequence=True), 0, marks=pytest.mark.full),
    ],
)
def test_a_converted_checkpoint_is_block_for_block_what_megatron_saves_of_the_loaded_model(
    tmp_path, family, parallel, mtp
):
    write_toy(family, tmp_path / "hf", ToySize(mtp_layers=mtp), seed=0)
    live = tmp_path / "live"
    run_ranks(save_live, 2, tmp_path / "hf", {"it": parallel}, live, SHARDING, bool(mtp), timeout_s=120)

    hf_to_megatron(tmp_path / "hf", tmp_path / "converted", parallel, OPTIONS)

    blocks, shapes, objects = contents(tmp_path / "converted")
    expected_blocks, expected_shapes, expected_objects = contents(live / "it")
    assert shapes == expected_shapes
    assert objects == expected_objects
    assert set(blocks) == set(expected_blocks)
    assert not [key for key, block in blocks.items() if not torch.equal(block, expected_blocks[key])]
    assert not [key for key, block in blocks.items() if block.dtype != expected_blocks[key].dtype]


@pytest.mark.full
def test_the_trainer_loads_a_converted_checkpoint_under_other_layouts(tmp_path):
    hf = small_model("qwen3_moe", tmp_path / "hf")
    hf_to_megatron(hf, tmp_path / "mc", ParallelConfig(tensor=2, sequence=True), OPTIONS)
    run_ranks(same_weights, 2, hf, tmp_path / "mc", LAYOUTS_OF_2, timeout_s=120)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "glm4_moe", "deepseek_v3", "minimax_m2", "gpt_oss", "olmoe", "qwen2_tied"]
)
def test_the_trainer_loads_a_converted_checkpoint_of_every_family_on_four_ranks(tmp_path, name):
    hf = small_model(name, tmp_path / "hf", num_attention_heads=4, num_key_value_heads=4)
    hf_to_megatron(hf, tmp_path / "mc", ParallelConfig(), OPTIONS)
    run_ranks(same_weights, 4, hf, tmp_path / "mc", layouts_of_4(name), timeout_s=150)


def assert_reads_as(stored: Path, hf: Path) -> None:
    with TorchDistCheckpoint(stored, read_hf_config(hf)) as reader, open_hf_checkpoint(hf) as folder:
        assert {name: (spec.shape, spec.dtype) for name, spec in reader.specs.items()} == {
            name: (spec.shape, spec.dtype) for name, spec in folder.specs.items()
        }
        for name, spec in folder.specs.items():
            whole = tuple(slice(0, size) for size in spec.shape)
            assert torch.equal(reader.read(name, whole), folder.read(name, whole)), name


@pytest.mark.full
def test_megatrons_own_checkpoints_read_as_hugging_face_tensors(tmp_path):
    hf = small_model("qwen3_moe", tmp_path / "hf")
    layouts = {"tp2": LAYOUTS_OF_2["tp2"], "pp2": LAYOUTS_OF_2["pp2"]}
    run_ranks(save_live, 2, hf, layouts, tmp_path / "ours", SHARDING, False, timeout_s=120)
    # The old form: one key for all experts of a layer.
    run_ranks(save_live, 2, hf, {"ep2": LAYOUTS_OF_2["ep2"]}, tmp_path / "old", {}, False, timeout_s=120)
    for stored in (tmp_path / "ours" / "tp2", tmp_path / "ours" / "pp2", tmp_path / "old" / "ep2"):
        assert_reads_as(stored, hf)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_tied", "glm4_moe", "deepseek_v3", "minimax_m2", "gpt_oss", "olmoe"]
)
@pytest.mark.parametrize("sharding", [SHARDING, {}], ids=["ours", "old"])
def test_megatrons_own_checkpoints_of_every_family_and_layout_read_as_hugging_face_tensors(tmp_path, name, sharding):
    hf = small_model(name, tmp_path / "hf", num_attention_heads=4, num_key_value_heads=4)
    layouts = layouts_of_4(name)
    run_ranks(save_live, 4, hf, layouts, tmp_path / "live", sharding, False, timeout_s=150)
    for stored in layouts:
        assert_reads_as(tmp_path / "live" / stored, hf)


def losses(rank, world_size, port, hf, settings, megatron=None, save_to=None):
    """Mean loss of two updates, from the weights of a Hugging Face checkpoint or of one of Megatron's."""
    trainer = trainer_config(world_size, **settings)
    worker = TrainerWorker(
        trainer, hf, seed=1, rank=rank, world_size=world_size, meeting=f"tcp://127.0.0.1:{port}",
        total_updates=10,
    )  # fmt: skip
    if megatron is None:
        worker.load_hf()
    else:
        worker.load_megatron(megatron)
    results = []
    for step in range(2):
        batches = packed_batches(step, worker.layout, trainer.max_tokens_per_rank)
        result = worker.runner.train_update(batches, token_cross_entropy, denominator=100.0, temperature=1.0)
        results.append(result.sums["loss"] / result.sums["tokens"])
    if save_to is not None:
        worker.save_checkpoint(save_to / "trainer")
        worker.export_hf(save_to / "hf")
    worker.close()
    return results


@pytest.mark.full
def test_training_from_a_converted_checkpoint_under_another_layout_gives_the_losses_of_hugging_face(tmp_path):
    hf = small_model("qwen3_moe", tmp_path / "hf")
    hf_to_megatron(hf, tmp_path / "mc", ParallelConfig(expert_tensor=2), OPTIONS)
    (expected,) = run_ranks(losses, 1, hf, {}, timeout_s=90)
    layout = {"tensor": 2, "sequence": True, "expert": 2}
    saved = tmp_path / "step"
    for found in run_ranks(losses, 2, hf, layout, tmp_path / "mc", saved, timeout_s=90):
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-5

    # The run's checkpoint, optimizer state included, turns into what the run itself exports.
    megatron_to_hf(saved, tmp_path / "back", OPTIONS)
    with SafetensorsFolder(tmp_path / "back") as back, SafetensorsFolder(saved / "hf") as exported:
        assert back.specs == exported.specs
        for name, spec in back.specs.items():
            whole = tuple(slice(0, size) for size in spec.shape)
            assert torch.equal(back.read(name, whole), exported.read(name, whole)), name


def test_a_broken_checkpoint_is_refused_by_what_is_wrong_with_it(tmp_path):
    hf = small_model("qwen3", tmp_path / "hf")
    hf_to_megatron(hf, tmp_path / "mc", ParallelConfig(), OPTIONS)
    config = read_hf_config(hf)
    with pytest.raises(ValueError, match="these are not the weights of the model"):
        TorchDistCheckpoint(tmp_path / "mc", {**config, "num_hidden_layers": 5})
    with pytest.raises(ValueError, match=r"has no \.metadata"):
        TorchDistCheckpoint(hf, config)

    cut = shutil.copytree(tmp_path / "mc", tmp_path / "cut")
    size = (cut / "__0_0.distcp").stat().st_size
    with (cut / "__0_0.distcp").open("r+b") as stream:
        stream.truncate(size - 100)
    with pytest.raises(ValueError, match=r"__0_0\.distcp: cut short"):
        TorchDistCheckpoint(cut, config)
    (cut / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match=r"__0_0\.distcp: missing"):
        TorchDistCheckpoint(cut, config)
    assert json.loads((tmp_path / "mc" / "checkpoint.json").read_text())["layout"]["tensor"] == 1
