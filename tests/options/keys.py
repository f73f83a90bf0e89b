"""Beginnings of overrides and of test ids."""

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
FSDP = f"{ACTOR}.fsdp_config"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

SUPPORT = "tests/options"
STEPS = "tests/engine/steps"
EXACTNESS = "tests/engine/test_exactness.py"
PRECISION = f"{SUPPORT}/test_precision.py::test_error_is_at_most_that_of_stock_rmpad"
RULES = "tests/config/test_rules.py::test_rule_stops_the_run_in_its_modes_and_only_there"
