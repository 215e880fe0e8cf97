"""docs/models.md lists what the tests of this folder prove, and nothing else."""

import re

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASS_OF
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WRAPPER_OF,
)

from engine.models.hf_text_part import FAMILIES
from engine.models.settings import FAMILY_OF
from tests.conftest import REPOSITORY
from tests.engine.models.checkpoints import CLASSES
from tests.engine.models.families import REFUSED, TEXT_PARTS, TIER_2

PAGE = (REPOSITORY / "docs" / "models.md").read_text()


def rows(title):
    section = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S).group(1)
    return re.findall(r"^\| `(\w+)` \| (.*?) \|$", section, re.M)


def test_tier_1_is_what_the_lean_decoder_reads_and_its_tests_build():
    documented = [name for name, _ in rows("Tier 1")]
    assert documented == sorted(FAMILY_OF)
    assert documented == sorted(model_class.__name__ for model_class in CLASSES.values())


def test_tier_2_is_what_its_tests_run():
    documented = [name for name, _ in rows("Tier 2")]
    assert documented == [CLASS_OF[model_type] for model_type in sorted(TIER_2)]
    assert len(documented) >= 25


def test_decoders_inside_models_of_images_are_those_that_its_tests_run():
    documented = [name for name, _ in rows("Decoders inside models of images")]
    assert documented == [WRAPPER_OF[model_type] for model_type in sorted(TEXT_PARTS)]
    assert sorted(FAMILIES) == sorted(TEXT_PARTS)


def test_each_refusal_has_the_reason_that_its_test_sees():
    assert rows("Refused") == [(CLASS_OF[name], REFUSED[name][1]) for name in sorted(REFUSED)]
