"""The table of docs/models.md that says which tests hold for each family: `python tests/family_table.py` prints it.

A cell is filled if the family is among the cases of the column's test, as the test itself has them.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent / folder) for folder in (".", "unit", "integration")]

from chat_templates import MODELS
from small_models import CONFIGS

from slimrl.models.family import FAMILIES
from slimrl.models.hf_config import published_model
from slimrl.models.published_index import index_names, is_stored_in
from slimrl.toys.wrapped_toys import WRAPPED_TOYS

NAMES = {model_type: family.name for family in FAMILIES for model_type in family.model_types}
"""model_type -> family"""


WRAPPED = set(WRAPPED_TOYS)


@dataclass(frozen=True, kw_only=True)
class Column:
    title: str
    test: str
    families: Callable[[], Iterable[str]]
    """Names of the families that are among the test's cases"""


def cases(module: str, function: str) -> list[Any]:
    """The first value of each case of a parametrised test."""
    test = getattr(importlib.import_module(module), function)
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize" and _first(mark.args[0]) in FIRST)
    return [_first(getattr(case, "values", case)) for case in mark.args[1]]


FIRST = ("family", "family_name", "name", "model_class")


def _first(value: Any) -> Any:
    if isinstance(value, str):
        return value.split(",")[0].strip()
    return value[0] if isinstance(value, list | tuple) else value


def of_tests(module: str, function: str) -> Callable[[], list[str]]:
    """The families of a test whose cases are families, or small models of them; wrapped models are of none."""
    return lambda: [NAMES.get(_model_type(case), case) for case in cases(module, function) if case not in WRAPPED]


def _model_type(case: str) -> str:
    return CONFIGS[case]["model_type"] if case in CONFIGS else case


def _published_in_fp8() -> list[str]:
    from test_published_models import config_of

    stored = [name for name in index_names() if is_stored_in(name, "F8_E4M3") and published_model(name)]
    return [NAMES[config_of(name)["model_type"]] for name in stored]


def _small() -> list[str]:
    return [NAMES[config["model_type"]] for config in CONFIGS.values()]


COLUMNS = (
    Column(
        title="logits", test="test_model_families: test_every_family_gives_the_logits_of_transformers", families=_small
    ),
    Column(
        title="round trip, layouts",
        test="test_model_families: test_weights_of_every_variant_return_bit_for_bit_under_every_layout",
        families=_small,
    ),
    Column(
        title="training, layouts",
        test="test_family_training: test_a_checkpoint_saved_under_one_layout_trains_on_under_another",
        families=of_tests("test_family_training", "test_a_checkpoint_saved_under_one_layout_trains_on_under_another"),
    ),
    Column(
        title="conversion",
        test="test_convert: test_every_family_comes_back_bit_for_bit_from_every_layout",
        families=of_tests("test_convert", "test_every_family_comes_back_bit_for_bit_from_every_layout"),
    ),
    Column(
        title="engine",
        test="test_engine_ranks: test_an_engine_of_several_ranks_computes_with_and_names_the_checkpoints_weights",
        families=of_tests(
            "test_engine_ranks", "test_an_engine_of_several_ranks_computes_with_and_names_the_checkpoints_weights"
        ),
    ),
    Column(
        title="resync",
        test="test_resync: test_an_engine_computes_with_what_the_trainer_sent",
        families=of_tests("test_resync", "test_an_engine_computes_with_what_the_trainer_sent"),
    ),
    Column(
        title="run",
        test="test_run_families: test_a_run_trains_what_its_engines_serve",
        families=of_tests("test_run_families", "test_a_run_trains_what_its_engines_serve"),
    ),
    Column(
        title="drafts",
        test="test_resync_drafts: test_every_transport_brings_the_trained_layers_to_the_draft_model",
        families=of_tests("test_resync_drafts", "test_every_transport_brings_the_trained_layers_to_the_draft_model"),
    ),
    Column(
        title="FP8 as published",
        test="test_published_models: test_published_tensors_are_those_of_the_weight_map_in_name_shape_and_dtype",
        families=_published_in_fp8,
    ),
    Column(
        title="template",
        test="test_published_templates: test_a_template_writes_what_the_published_one_does",
        families=lambda: [NAMES[model.model_type] for model in MODELS.values() if model.model_type in NAMES],
    ),
)


def table() -> list[str]:
    """Lines of the two tables: families by columns, and the test behind each column."""
    held = {column.title: set(column.families()) for column in COLUMNS}
    unknown = set().union(*held.values()) - {family.name for family in FAMILIES}
    assert not unknown, unknown
    header = ["family", *held]
    rows = [[family.name, *("yes" if family.name in names else "" for names in held.values())] for family in FAMILIES]
    tests = [[column.title, f"`{column.test}`"] for column in COLUMNS]
    return [*_lines(header, rows), "", *_lines(["column", "test"], tests)]


def _lines(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


if __name__ == "__main__":
    print("\n".join(table()))
