"""``python -m verl_pg_plugin.main_ppo``: verl's PPO entry point with this plugin's config and validators.

Takes every override of ``python -m verl.trainer.main_ppo``. A run that cannot start as configured ends
with a message on stderr and exit code 2, before Ray starts.
"""

import inspect
import sys

import hydra
from omegaconf import DictConfig
from verl.trainer import main_ppo as verls
from verl.utils.device import auto_set_device

from verl_pg_plugin.config.engage import engage_or_exit
from verl_pg_plugin.config.options import force_add


def main() -> None:
    """Entry point: user errors exit with code 2 and no traceback, a failed training with code 1."""
    sys.argv[1:] = map(force_add, sys.argv[1:])
    _run()


@hydra.main(config_path="config/hydra", config_name="pg_ppo_trainer", version_base=None)
def _run(config: DictConfig) -> None:
    auto_set_device(config)
    engage_or_exit(config, from_ours=True)
    run_ppo = inspect.unwrap(verls.run_ppo)  # without the hook that would ask all again
    if config.trainer.use_v1:
        run_ppo(config, verls.TaskRunnerV1)
    else:
        from verl.trainer.main_ppo_v0 import TaskRunner

        run_ppo(config, TaskRunner)


if __name__ == "__main__":
    main()
