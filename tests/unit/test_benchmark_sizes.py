"""The checkpoint of benchmarks/conversion.py has the size that it was asked for."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FILE = Path(__file__).parents[2] / "benchmarks" / "conversion.py"


@pytest.fixture(scope="module")
def conversion():
    spec = importlib.util.spec_from_file_location("conversion_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FILE.parent)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("gigabytes", "relative"), [(0.1, 0.2), (0.12, 0.01), (1.0, 0.01), (4.0, 0.1)])
def test_the_model_has_the_size_that_was_asked_for(conversion, gigabytes, relative):
    config = conversion.config_of(gigabytes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert nbytes == conversion.tensor_bytes(config)
    assert nbytes == pytest.approx(gigabytes * 1e9, rel=relative)


def test_a_size_below_the_smallest_is_refused(conversion):
    with pytest.raises(ValueError, match=r"--gigabytes 0\.05: the smallest model has 0\.115\."):
        conversion.config_of(0.05)
