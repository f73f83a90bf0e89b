"""Subcommands of ``python -m verl_pg_plugin``."""
