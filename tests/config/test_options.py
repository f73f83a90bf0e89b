"""Unknown options and values are one clear error that names the valid ones."""

import json
import subprocess
import sys

import pytest

from verl_pg_plugin.config import PrefixGrouperEngineConfig, PrefixGrouperOptions
from verl_pg_plugin.config.options import OPTION_NAMES, option_issues
from verl_pg_plugin.issue import ConfigError

VALUES = "is unknown; the values are "
WRONG = {
    "attention_kernel": (f"{VALUES}auto, flash_attn_4, flash_attn_3, flash_attn_2, torch_", ["flash", None]),
    "activations": (f"{VALUES}auto, all, attention, attention_on_host, inputs, inputs_on_h", ["mlp", True, ["inputs"]]),
    "logits_chunk_size": ("must be an integer >= 0", [-1, 1.5, "16k", True, None]),
    "compile_layers": (f"{VALUES}auto, True and False without quotes", ["maybe", 1]),
    "prefix_cache": (f"{VALUES}auto, off", ["always"]),
    "old_log_prob": (f"{VALUES}auto, always", ["off", True, None]),
    "rollout": (f"{VALUES}auto, off", ["on", False]),
    "verify": (f"{VALUES}auto, off, first and every_<number>", ["always", True, "every_0", "every_", 50]),
    "verify_tolerance": ("must be a finite number > 0", [0.0, float("inf"), float("nan"), "tight", True]),
}


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_wrong_values_are_named_with_the_valid_ones(name: str) -> None:
    why, values = WRONG[name]
    for value in values:
        (issue,) = option_issues({name: value})
        assert issue.why.startswith(why), value
        assert issue.fix.startswith(f"++prefix_grouper.{name}=")
        with pytest.raises(ValueError, match=rf"prefix_grouper.{name}=.*. Fix: \+\+prefix_grouper.{name}="):
            PrefixGrouperOptions(**{name: value})


def test_unknown_options_name_the_close_or_all():
    (issue,) = option_issues({"verfy": "first"})
    assert issue.fix == "did you mean ++prefix_grouper.verify=first?"
    (issue,) = option_issues({"zzz": 1})
    assert issue.why == f"no such option; the options are {', '.join(OPTION_NAMES)}"
    assert issue.fix == "remove it"


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
