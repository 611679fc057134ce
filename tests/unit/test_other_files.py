"""What is copied beside the weights of a checkpoint."""

from slimrl.checkpoints.other_files import copy_other_files

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tiktoken.model",
    "chat_template.jinja",
    "generation_config.json",
    "LICENSE",
    "configuration_x.py",
    "modeling_x.py",
    "tokenization_x.py",
    "preprocessor_config.json",
)
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
    "consolidated.00.pth",
)


def test_tokenizer_and_code_are_copied_and_weights_config_and_folders_are_not(tmp_path):
    src, out = tmp_path / "src", tmp_path / "out"
    (src / "original").mkdir(parents=True)
    out.mkdir()
    for name in (*COPIED, *WEIGHTS, "config.json", ".hidden", "original/a.json"):
        (src / name).write_text(name)
    copy_other_files(src, out)
    assert sorted(file.name for file in out.iterdir()) == sorted(COPIED)
    assert all((out / name).read_text() == name for name in COPIED)
