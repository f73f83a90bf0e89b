"""A value that is not what it seems is one clear error with the values that are taken, beside all the others."""

from __future__ import annotations

import pytest

from verl_pg_plugin.config import Mode, PrefixGrouperOptions
from verl_pg_plugin.config.options import OPTION_NAMES, option_violations
from verl_pg_plugin.config.validate import validate

USE_PREFIX_GROUPER = "actor_rollout_ref.actor.use_prefix_grouper"
USE_REMOVE_PADDING = "actor_rollout_ref.model.use_remove_padding"

BOOLEAN = "is not a boolean; the values are True and False"
WRONG = [
    (
        "attention_kernel",
        "flash",
        "is unknown; the values are auto, flash_attn_4, flash_attn_3, flash_attn_2, torch_varlen, sdpa",
    ),
    ("attention_kernel", None, "is unknown"),
    ("logits_chunk_size", -1, "is below 0"),
    ("logits_chunk_size", 1.5, "is not an integer"),
    ("logits_chunk_size", "abc", "is not an integer"),
    ("logits_chunk_size", "16k", "is not an integer"),
    ("logits_chunk_size", True, "is not an integer"),
    ("static_rows", "no", BOOLEAN),
    ("static_rows", "off", BOOLEAN),
    ("static_rows", 1, BOOLEAN),
    ("compile_layers", "maybe", "is neither auto nor a boolean; the values are auto, True and False without quotes"),
    ("recompute_attention", "yes", BOOLEAN),
    (
        "keep_activations",
        "mlps",
        "is unknown; the values are auto, attention, mlp, all and GiB above 0 as a number without unit or quotes",
    ),
    ("keep_activations", 0, "is unknown"),
    ("keep_activations", -4.0, "is unknown"),
    ("keep_activations", float("inf"), "is unknown"),
    ("keep_activations", True, "is unknown"),
    ("keep_activations", None, "is unknown"),
    ("min_dedup_ratio", 0.5, "is below 1"),
    ("min_dedup_ratio", float("nan"), "is below 1"),
    ("min_dedup_ratio", "2x", "is not a number"),
    ("verify", "always", "is unknown; the values are off, first, every_n"),
    ("verify", True, "is unknown"),
    ("verify_every", 0, "is below 1"),
    ("verify_rows", 0, "is below 1"),
    ("verify_tolerance", 0.0, "is not a finite number above 0"),
    ("verify_tolerance", float("inf"), "is not a finite number above 0"),
    ("verify_tolerance", float("nan"), "is not a finite number above 0"),
    ("verify_tolerance", "tight", "is not a finite number above 0"),
    ("carry", "always", "is unknown; the values are auto, never"),
    ("console", "quiet", "is unknown; the values are short, full"),
    ("on_mismatch", "ignore", "is unknown; the values are raise, rmpad"),
]


def test_no_option_takes_everything():
    assert {name for name, _, _ in WRONG} == set(OPTION_NAMES)


@pytest.mark.parametrize(("name", "value", "why"), WRONG)
def test_the_dataclass_names_the_value_and_those_that_it_takes(name, value, why):
    with pytest.raises(ValueError, match=f"prefix_grouper.{name}=.*{why}.*; set \\+\\+prefix_grouper.{name}="):
        PrefixGrouperOptions(**{name: value})


@pytest.mark.parametrize(("name", "value", "why"), WRONG)
def test_the_validators_say_the_same_before_ray_starts(name, value, why):
    (violation,) = option_violations({name: value})
    assert violation.why.startswith(why)
    assert violation.rule == ("attention_kernel" if name == "attention_kernel" else "option_value")
    assert violation.fix.startswith(f"++prefix_grouper.{name}=")


def test_all_wrong_values_are_listed_at_once(make_config):
    wrong = {"static_rows": "no", "compile_layers": "maybe", "logits_chunk_size": "abc", "min_dedup_ratio": "2x"}
    settings = {f"prefix_grouper.{name}": value for name, value in wrong.items()}
    found = validate(make_config(Mode.PACKED, {**settings, "distillation.enabled": True}))
    listed = {str(setting) for violation in found for setting in violation.settings}
    assert {f"{key}={value}" for key, value in settings.items()} < listed
    assert "distillation.enabled=True" in listed


def test_words_that_mean_no_do_not_switch_an_option_on(make_config):
    """In padded mode ``static_rows=True`` is an error of its own; ``no`` is one error, not two."""
    (violation,) = validate(make_config(Mode.PADDED_GROUPS, {"prefix_grouper.static_rows": "no"}))
    assert violation.rule == "option_value"


@pytest.mark.parametrize("key", [USE_PREFIX_GROUPER, USE_REMOVE_PADDING])
@pytest.mark.parametrize("value", ["no", "off", "packed", 2])
def test_a_mode_flag_that_is_no_boolean_is_refused(make_config, key, value):
    found = {violation.rule: violation for violation in validate(make_config(Mode.PACKED, {key: value}))}
    assert str(found["flag_value"].settings[0]) == f"{key}={value}"
    assert found["flag_value"].fix == f"{key}=True or False"


def test_defaults_let_everything_share_and_verify_nothing():
    """What a user gets who sets two flags; docs/options.md tells the same."""
    options = PrefixGrouperOptions()
    assert (options.min_dedup_ratio, options.verify, options.carry) == (1.0, "off", "auto")
    assert options.keep_activations == "attention"
    assert (options.recompute_attention, options.static_rows, options.compile_layers) == (False, False, "auto")
