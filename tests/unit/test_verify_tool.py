"""`slimrl-tools verify` on toys: the verdict, its exit code, and that what differs is named."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from slimrl_tools.cli import app
from slimrl_tools.open_checkpoint import FoundCheckpoint
from slimrl_tools.toy.toy import write_toy
from slimrl_tools.verify import verification
from slimrl_tools.verify.compare import EXACT, Comparison, TensorDifference, fp8_limit
from slimrl_tools.verify.logits import compare_logits
from slimrl_tools.verify.verification import Verification
from toy_tools import SMALL, run
from typer.testing import CliRunner

from slimrl.data.model_weights import TensorSpec

FILE = "model-00001-of-00001.safetensors"


def printed(*arguments, code=0) -> str:
    """Standard output alone, as a program that reads it gets it."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.stdout


def changed(toy, change, **config):
    """A copy of a toy whose tensors went through `change`, with other keys in its config."""
    copy = toy.with_name("changed")
    copy.mkdir()
    tensors = load_file(toy / FILE)
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text(json.dumps(json.loads((toy / "config.json").read_text()) | config))
    return copy


def test_a_copy_in_other_files_is_the_same(toy):
    output = run("verify", toy, changed(toy, lambda tensors: None))
    assert "DIFFERENT" not in output
    assert output.strip().endswith("the same")


def test_one_changed_element_is_named_with_its_place_and_fails(toy, tmp_path):
    name = "model.layers.1.mlp.experts.3.up_proj.weight"

    def change(tensors):
        tensors[name][5, 7] += 0.125

    copy = changed(toy, change)
    output = run("verify", toy, copy, code=1)
    assert name in output
    assert "[5, 7]" in output
    assert output.strip().endswith("DIFFERENT: values")
    report = json.loads(printed("verify", toy, copy, "--json", code=1))
    (difference,) = report["tensors"]["differences"]
    assert (report["same"], difference["name"], difference["where"]) == (False, name, [5, 7])
    assert difference["max_abs"] == pytest.approx(0.125, abs=1e-6)
    run("verify", toy, copy, "--tolerance", 0.13)
    run("verify", toy, copy, "--tolerance", 0.12, code=1)


def test_missing_and_additional_tensors_are_named_and_fail(toy):
    def change(tensors):
        tensors["model.other"] = tensors.pop("model.norm.weight")

    output = run("verify", toy, changed(toy, change), code=1)
    assert "1 missing in B:\n  model.norm.weight" in output
    assert "1 only in B:\n  model.other" in output


def test_another_dtype_fails_unless_it_is_to_be_ignored_and_values_keep_its_rounding(toy):
    def cast(tensors):
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})

    copy = changed(toy, cast)
    output = run("verify", toy, copy, code=1)
    assert "of another dtype, such as" in output
    assert "rounding to bfloat16" in output
    assert "0 beyond it" in output
    run("verify", toy, copy, "--ignore-dtype")


def test_a_rounding_that_is_not_to_nearest_fails(toy):
    def truncate(tensors):
        for name, tensor in tensors.items():
            if not name.endswith("norm.weight"):
                tensors[name] = (tensor.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()

    assert "beyond" in run("verify", toy, changed(toy, truncate), "--ignore-dtype", code=1)


def test_configs_that_describe_other_models_fail_though_the_tensors_are_equal(toy):
    output = run("verify", toy, changed(toy, lambda tensors: None, rms_norm_eps=1e-5, rope_theta=5.0), code=1)
    assert "layernorm_epsilon: 1e-06 and 1e-05" in output
    assert "rotary_base: 1000.0 and 5.0" in output


def test_block_fp8_is_compared_dequantised_within_its_quantisation_error(toy, tmp_path):
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    output = run("verify", toy, tmp_path / "fp8")
    assert "block FP8" in output
    assert "0 beyond it" in output
    # The same limit does not pass a weight that is off by more.
    file = tmp_path / "fp8" / FILE
    tensors = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name + "_scale_inv"] *= 1.3
    save_file(tensors, file)
    assert name in run("verify", toy, tmp_path / "fp8", code=1)
    run("verify", tmp_path / "fp8", tmp_path / "fp8")


def test_two_block_fp8_checkpoints_are_compared_exactly(toy, tmp_path):
    run("quantize", toy, tmp_path / "fp8", "--block", 16)
    shutil.copytree(tmp_path / "fp8", tmp_path / "other")
    tensors = load_file(tmp_path / "other" / FILE)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    # Within the error that a quantisation makes.
    tensors[f"{name}_scale_inv"] *= 1.01
    save_file(tensors, tmp_path / "other" / FILE)
    assert name in run("verify", tmp_path / "fp8", tmp_path / "other", code=1)


def test_what_mtp_layers_repeat_may_be_left_out(tmp_path):
    write_toy("glm4_moe", tmp_path / "toy", replace(SMALL, mtp_layers=1), 0)
    copies = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")

    def drop(tensors):
        for name in copies:
            del tensors[name]

    run("verify", tmp_path / "toy", changed(tmp_path / "toy", drop))
    run("verify", tmp_path / "changed", tmp_path / "toy")


def test_what_is_no_checkpoint_is_refused(toy, tmp_path):
    assert "no such folder" in run("verify", toy, tmp_path / "nothing", code=2)
    assert "one of fp32, bf16" in run("verify", toy, toy, "--logits", 1, "--logits-dtype", "int8", code=2)


def test_a_limit_is_that_of_the_quantisation_of_one_side_alone_or_the_one_that_is_given():
    spec = TensorSpec(name="w", shape=(1,), dtype="float32")
    one, none = frozenset({"w"}), frozenset()
    assert verification._limits(one, none, None)(spec, spec) == fp8_limit("float32")
    assert verification._limits(none, one, None)(spec, spec) == fp8_limit("float32")
    assert (
        verification._limits(one, one, None)(spec, spec) == verification._limits(none, none, None)(spec, spec) == EXACT
    )
    given = verification._limits(one, none, 0.25)(spec, spec)
    assert (given.absolute, given.relative, given.of_largest) == (0.25, 0.0, 0.0)


def test_each_kind_of_difference_is_a_reason_of_its_own(tmp_path):
    found = FoundCheckpoint(format="huggingface", path=tmp_path, hf_dir=tmp_path)
    within = TensorDifference(name="w", max_abs=1.0, max_relative=math.inf, where=(0,), limit=EXACT, within=True)

    def verdict(*, config=(), logits=None, ignore_dtype=False, **tensors):
        return Verification(
            a=found, b=found, config=list(config), tensors=Comparison(**tensors), logits=logits,
            ignore_dtype=ignore_dtype, left_out=[],
        )  # fmt: skip

    assert verdict(differences=[within]).same
    assert verdict(config=["layers: 1 and 2"]).reasons == ["configs"]
    assert verdict(missing=["a"], extra=["b"]).reasons == ["missing tensors", "additional tensors"]
    assert verdict(shapes=[("a", (1,), (2,))], dtypes=[("a", "float32", "float16")]).reasons == ["shapes", "dtypes"]
    assert verdict(dtypes=[("a", "float32", "float16")], ignore_dtype=True).same
    assert verdict(differences=[within, replace(within, within=False)]).reasons == ["values"]
    for b, reasons in ((torch.ones(1, 1, 2), []), (torch.zeros(1, 1, 2), ["logits"])):
        assert verdict(logits=compare_logits(torch.ones(1, 1, 2), b, "float32")).reasons == reasons
    told = verdict(differences=[within]).as_dict()
    assert told["tensors"]["differences"][0]["max_relative"] == "inf"
    json.dumps(told, allow_nan=False)
