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
    def num_attention_pairs(self) -> int:
        """(query, key) pairs under the causal mask, for counting FLOPs."""

    @property
    def shares_rows(self) -> bool:
        """Whether attention differs from that of every sequence alone."""

    @property
    def stands_alone(self) -> bool:
        """Whether no row of another micro-batch is read; False for parts of a chain."""

    @property
    def head_rows(self) -> IntArray:
        """(N,) rows whose label lies in a response, ascending."""
