"""Unknown options and values are one clear error that names the valid ones."""

import json
import subprocess
import sys

import pytest

from verl_pg_plugin.config import PrefixGrouperEngineConfig, PrefixGrouperOptions
from verl_pg_plugin.config.options import OPTION_NAMES, option_issues
from verl_pg_plugin.issue import ConfigError

WRONG = [
    ("attention_kernel", "flash", "is unknown; the values are auto, flash_attn_4, flash_attn_3, flash_attn_2, torch_"),
    ("attention_kernel", None, "is unknown"),
    ("activations", "mlp", "is unknown; the values are auto, all, attention, attention_on_host, inputs, inputs_on_h"),
    ("activations", True, "is unknown"),
    ("activations", ["inputs"], "is unknown"),
    *(("logits_chunk_size", value, "must be an integer >= 0") for value in (-1, 1.5, "16k", True, None)),
    ("compile_layers", "maybe", "is unknown; the values are auto, True and False without quotes"),
    ("compile_layers", 1, "is unknown; the values are auto, True"),
    ("prefix_cache", "always", "is unknown; the values are auto, off"),
    *(("old_log_prob", value, "is unknown; the values are auto, always") for value in ("off", True, None)),
    ("rollout", "on", "is unknown; the values are auto, off"),
    ("rollout", False, "is unknown; the values are auto, off"),
    *(
        ("verify", value, "is unknown; the values are auto, off, first and every_<number>")
        for value in ("always", True, "every_0", "every_", 50)
    ),
    *(
        ("verify_tolerance", value, "must be a finite number > 0")
        for value in (0.0, float("inf"), float("nan"), "tight", True)
    ),
]


@pytest.mark.parametrize(("name", "value", "why"), WRONG)
def test_wrong_values_are_named_with_the_valid_ones(name, value, why):
    (issue,) = option_issues({name: value})
    assert issue.why.startswith(why)
    assert issue.fix.startswith(f"++prefix_grouper.{name}=")
    with pytest.raises(ValueError, match=rf"prefix_grouper.{name}=.*. Fix: \+\+prefix_grouper.{name}="):
        PrefixGrouperOptions(**{name: value})


def test_option_names_are_checked_and_each_has_wrong_values():
    (issue,) = option_issues({"verfy": "first"})
    assert issue.fix == "did you mean ++prefix_grouper.verify=first?"
    (issue,) = option_issues({"zzz": 1})
    assert issue.why == f"no such option; the options are {', '.join(OPTION_NAMES)}"
    assert issue.fix == "remove it"
    assert {name for name, _, _ in WRONG} == set(OPTION_NAMES)


def test_engine_config_checks_options_of_sft_runs():
    read = PrefixGrouperEngineConfig(prefix_grouper={"activations": "inputs"}).prefix_grouper
    assert read == PrefixGrouperOptions(activations="inputs")
    for wrong, fix in ({"activatons": "inputs"}, "activations"), ({"verify": "every100"}, "verify=auto, off, first"):
        with pytest.raises(ConfigError, match=rf"\+engine\.prefix_grouper\.{fix}"):
            PrefixGrouperEngineConfig(prefix_grouper=wrong)
    with pytest.raises(ConfigError, match="is not a boolean"):
        PrefixGrouperEngineConfig(use_prefix_grouper="no")
    assert PrefixGrouperEngineConfig(use_prefix_grouper=1).use_prefix_grouper  # as in preflight
    with pytest.raises(ConfigError, match=r"\+engine\.prefix_grouper=inputs\n   why: is not a section of options"):
        PrefixGrouperEngineConfig(prefix_grouper="inputs")


def test_options_import_neither_torch_nor_verl():
    code = "from verl_pg_plugin.config import Mode, PrefixGrouperOptions, mode_of; PrefixGrouperOptions()\n"
    code += "import json, sys; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert {"torch", "transformers", "verl", "ray", "verl_pg_plugin.engine"}.isdisjoint(loaded)
