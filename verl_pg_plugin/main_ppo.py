"""``python -m verl_pg_plugin.main_ppo``: verl's PPO entry point with this plugin's config and checks.

It accepts every override of ``python -m verl.trainer.main_ppo``. A run that cannot start as configured exits with a
message on stderr and code 2 before Ray starts.
"""

import inspect
import sys

import hydra
from omegaconf import DictConfig
from verl.trainer import main_ppo as verl_main_ppo
from verl.utils.device import auto_set_device

from verl_pg_plugin.config.engage import engage_or_exit
from verl_pg_plugin.config.options import force_add


def main() -> None:
    """Run the entry point: config errors exit with code 2 and no traceback, a failed training with code 1."""
    sys.argv[1:] = map(force_add, sys.argv[1:])
    _run()


@hydra.main(config_path="config/hydra", config_name="pg_ppo_trainer", version_base=None)
def _run(config: DictConfig) -> None:
    auto_set_device(config)
    engage_or_exit(config, from_ours=True)
    run_ppo = inspect.unwrap(verl_main_ppo.run_ppo)  # without our hook, which would check again
    if config.trainer.use_v1:
        run_ppo(config, verl_main_ppo.TaskRunnerV1)
    else:
        from verl.trainer.main_ppo_v0 import TaskRunner

        run_ppo(config, TaskRunner)


if __name__ == "__main__":
    main()
