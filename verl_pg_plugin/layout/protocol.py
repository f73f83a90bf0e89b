"""What every layout of rows can tell."""

from typing import TYPE_CHECKING, Protocol

from verl_pg_plugin.layout.prefix_order import IntArray

if TYPE_CHECKING:
    from verl_pg_plugin.layout.carried import CarriedLayout


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
    def reads_ancestors(self) -> bool:
        """Whether attention reads rows beside those of a row's own segment."""

    @property
    def stands_alone(self) -> bool:
        """Whether no row of another micro-batch is read; False for parts of a chain."""

    @property
    def export(self) -> "CarriedLayout | None":
        """What is computed without gradient in front of it, which parts of a chain alone may need."""

    @property
    def head_rows(self) -> IntArray:
        """(N,) rows whose label lies in a response, ascending."""
