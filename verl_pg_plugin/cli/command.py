"""What the subcommands of ``python -m verl_pg_plugin`` share."""


class CommandError(Exception):
    """A subcommand cannot do what was asked; the message is one line that names the cause and the fix."""
