"""Calls ``register`` when imported: for ``actor_rollout_ref.model.external_lib``, which verl imports in its workers."""

from verl_pg_plugin.models import register

register()
