"""The cpu platform is there on request and invisible otherwise."""

from __future__ import annotations

from tests.fresh import run_fresh

SELECTED = """
import sys, verl
from verl.utils.device import get_device_name, get_device_id, get_torch_device
from verl.utils.distributed import initialize_global_process_group_ray as init
sys.stdout.write(f'{get_device_name()} {get_device_id()} {get_torch_device().__name__} {init.__defaults__}')
"""
LEFT_ALONE = """
import os, sys
os.environ.pop("VERL_PLATFORM", None)
import verl
from verl.plugin.platform.platform_manager import PlatformRegistry, _detect_platform_name
from verl.utils.distributed import initialize_global_process_group_ray as init
registered = 'cpu' in PlatformRegistry.registered_names()
sys.stdout.write(f'{registered} {_detect_platform_name() == "cpu"} {init.__defaults__}')
"""


def test_the_platform_is_selected_on_request_and_auto_detection_and_process_groups_are_left_alone_else() -> None:
    selected, left_alone = run_fresh([(SELECTED, {"VERL_PLATFORM": "cpu"}), (LEFT_ALONE, {})])
    assert selected.stdout.splitlines()[-1] == "cpu cpu verl_pg_plugin.cpu.device (None, 'cpu:gloo')", selected.stderr
    assert left_alone.stdout.splitlines()[-1] == "True False (None, None)", left_alone.stderr
