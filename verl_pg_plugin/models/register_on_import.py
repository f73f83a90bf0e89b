"""Calls ``register`` on import, for ``actor_rollout_ref.model.external_lib``, which verl's workers import."""

from verl_pg_plugin.models import register

register()
