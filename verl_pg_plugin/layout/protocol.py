"""What every layout of rows can tell."""

from typing import Protocol

from verl_pg_plugin.layout.prefix_order import IntArray


class Layout(Protocol):
    """The rows of one forward over B sequences; numpy integers, host memory.

    Shape legend: T rows, N rows that need the head, M response tokens.
    """

    @property
    def num_rows(self) -> int:
        """Physical tokens: rows the model computes."""

    @property
    def num_roots(self) -> int:
        """Groups: sets of sequences that share at least their first row."""

    @property
    def num_logical_tokens(self) -> int:
        """Tokens that computing every sequence alone without padding would run."""

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """(S,) rows that each segment sees before its own, and (S,) its own."""

    @property
    def shares_rows(self) -> bool:
        """Whether attention differs from that of every sequence alone."""

    @property
    def num_copied_keys(self) -> int:
        """Keys, each with its value, that our attention copies in every layer."""

    @property
    def stands_alone(self) -> bool:
        """Whether no row of another micro-batch is read; False for parts of a chain."""

    @property
    def head_rows(self) -> IntArray:
        """(N,) rows whose label lies in a response, ascending."""
