"""Layout of a padded forward in the format of ``PrefixGrouper``: each line is a prompt with all its responses.

For a prompt p_0 .. p_{P-1} and responses r^i the line is

    [p_0 .. p_{P-2}] [p_{P-1} r^1_0 .. r^1_{R_1-2}] [p_{P-1} r^2_0 .. r^2_{R_2-2}] ... [padding]

As in ``PackedLayout``, sequences fork one token before they differ, so every token has one label.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_pg_plugin.layout.order import IntArray, counted


@dataclass(frozen=True)
class PaddedLayout:
    """Index arrays of a padded forward over B sequences in G groups; numpy integers in host memory.

    Shapes: S tokens of the longest line, N response tokens. Flat indices run over all lines.

    Attributes:
        group_info: for each group, the tokens of the prefix (P - 1) and of every response (R_i), as upstream takes it.
        input_ids, position_ids, labels: (G, S); 0 at padding.
        head_index: (N,) flat index of the token that predicts each response token, ascending.
        response_index: (N,) index of that token in the concatenated sequences, where verl reads it.
        response_head: (N,) 0, 1, 2, ...: response tokens share no head output.
        num_total_tokens: see ``PackedLayout``.
    """

    group_info: list[list[int]]
    input_ids: IntArray
    position_ids: IntArray
    labels: IntArray
    head_index: IntArray
    response_index: IntArray
    response_head: IntArray
    num_total_tokens: int

    # The interface of ``PackedLayout``.
    shares_tokens = reads_ancestors = True
    num_cached = 0
    cache_use: ClassVar[dict[str, int]] = {}
    prefill = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding included."""
        return self.input_ids.size

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """(S,) earlier tokens and (S,) own tokens of each segment: the prefix and the responses of every group."""
        start = [at for prefix, *responses in self.group_info for at in (0, *[prefix] * len(responses))]
        return np.array(start), np.array([tokens for group in self.group_info for tokens in group])


def build_padded_layout(tokens: IntArray, offsets: IntArray, prompt_lengths: IntArray) -> PaddedLayout:
    """Put all sequences with the same prompt into one line; arguments as for ``build_packed_layout``."""
    starts, forks = offsets[:-1].tolist(), (offsets[:-1] + prompt_lengths - 1).tolist()
    # Upstream needs a token in every suffix: an empty response gets the prompt's last token, which predicts nothing.
    stops = np.maximum(offsets[1:] - 1, offsets[:-1] + prompt_lengths).tolist()
    groups: dict[bytes, list[int]] = {}
    for s, (start, fork) in enumerate(zip(starts, forks, strict=True)):
        groups.setdefault(tokens[start : fork + 1].tobytes(), []).append(s)

    lines: list[list[IntArray]] = []  # indices into `tokens` of each group's prefix and responses
    for members in groups.values():
        prefix = np.arange(starts[members[0]], forks[members[0]])
        lines.append([prefix, *(np.arange(forks[s], stops[s]) for s in members)])
    group_info = [list(map(len, line)) for line in lines]
    places = np.full((len(lines), max(map(sum, group_info))), -1)  # -1 at padding
    for g, line in enumerate(lines):
        places[g, : sum(group_info[g])] = np.concatenate(line)
    sequence = np.repeat(np.arange(len(starts)), np.diff(offsets))
    predicts = (places >= 0) & (np.arange(places.shape[1]) >= np.array([[prefix] for prefix, *_ in group_info]))
    predicts &= places + 1 < offsets[1:][sequence[places]]
    predicts[0, 0] |= not predicts.any()  # the head needs a token; this output is not read
    return PaddedLayout(
        group_info=group_info,
        input_ids=np.where(places < 0, 0, tokens[places]),
        position_ids=np.where(places < 0, 0, counted(offsets)[places]),
        labels=np.where(places < 0, 0, tokens[(places + 1) % len(tokens)]),
        head_index=np.flatnonzero(predicts),
        response_index=places[predicts],
        response_head=np.arange(predicts.sum()),
        num_total_tokens=len(tokens),
    )
