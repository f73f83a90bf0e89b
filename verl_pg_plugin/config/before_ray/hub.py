"""Is a model that is no folder in the cache of huggingface_hub, or on a hub that can be reached?"""

from __future__ import annotations

from collections.abc import Iterator

from httpx import ConnectError, ConnectTimeout, HTTPError
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from omegaconf import DictConfig, OmegaConf

from verl_pg_plugin.config.before_ray.reading import is_remote, wrong
from verl_pg_plugin.config.checkpoint_checks import is_local, local_checkpoint
from verl_pg_plugin.config.facts import runs_critic
from verl_pg_plugin.config.keys import CRITIC_MODEL, MODEL
from verl_pg_plugin.config.violation import Violation

__all__ = ["hub_violations"]

TIMEOUT_S = 5.0


def hub_violations(config: DictConfig) -> Iterator[Violation]:
    """Hub ids of models that are not in this machine's cache and cannot be downloaded from here.

    A run over several nodes may download on another one, so it is not asked.
    """
    if OmegaConf.select(config, "trainer.nnodes") != 1:
        return
    sections = [MODEL, *([CRITIC_MODEL] if runs_critic(config) else [])]
    seen = set()
    for section in sections:
        key = f"{section}.path"
        path = str(OmegaConf.select(config, key))
        if path in seen or is_local(path) or is_remote(path) or local_checkpoint(path):
            continue
        seen.add(path)
        if obstacle := _obstacle(path):
            yield wrong(config, "hub_model", key, *obstacle)


def _obstacle(repo: str) -> tuple[str, str] | None:
    """Why the hub does not give this model away, and what to do; None where it does."""
    folder = "a folder written by save_pretrained"
    try:
        HfApi().model_info(repo, timeout=TIMEOUT_S)
    except HFValidationError:
        return "is neither a folder nor a name that a hub could have", folder
    except GatedRepoError:
        return f"is gated on {constants.ENDPOINT}", "accept its terms there and export HF_TOKEN=<yours>"
    except RepositoryNotFoundError:
        return f"is neither a folder nor a model that {constants.ENDPOINT} shows you", f"{folder}, or export HF_TOKEN"
    except OfflineModeIsEnabled:
        return "is neither a folder nor in the cache, and HF_HUB_OFFLINE forbids to download it", folder
    except (ConnectError, ConnectTimeout) as error:
        why = f"is neither a folder nor in the cache, and {constants.ENDPOINT} cannot be reached from here: {error}"
        return why, f"huggingface-cli download {repo} where it can be, or {folder}"
    except HTTPError:
        return None  # busy or slow: what downloads the model tries again
    return None
