"""Hydra configs; a package so that `pkg://verl_pg_plugin.config.hydra` is a search path."""
