"""The tokens of one padded forward: a group of responses to one prompt in each line, as ``PrefixGrouper`` has them.

For a prompt p_0 .. p_{P-1} and responses r^i the line is

    [p_0 .. p_{P-2}] [p_{P-1} r^1_0 .. r^1_{R_1-2}] [p_{P-1} r^2_0 .. r^2_{R_2-2}] ... [padding]

As in ``PackedLayout`` the sequences fork one token before they differ, so every token has one label.
"""

from dataclasses import dataclass

import numpy as np

from verl_pg_plugin.layout.order import IntArray, counted


@dataclass(frozen=True)
class PaddedLayout:
    """Index maps of a padded forward over B sequences in G groups; numpy integers, host memory.

    Shape legend: S tokens of the longest line, N response tokens. Flat indices count all lines, one after the other.

    Attributes:
        group_info: of each group, tokens of the prefix (P - 1), then of every response (R_i), as upstream takes it.
        input_ids, position_ids, labels: (G, S) of each token; 0 at padding.
        head_index: (N,) flat index of the token that predicts each response token, ascending.
        response_index: (N,) place of that token in the sequences laid one after the other, where verl reads it.
        response_head: (N,) 0, 1, 2, ...: no token is shared by two response tokens.
        head_sequence: (N,) the sequence of each of ``head_index``.
        num_logical_tokens: see ``PackedLayout``.
    """

    group_info: list[list[int]]
    input_ids: IntArray
    position_ids: IntArray
    labels: IntArray
    head_index: IntArray
    response_index: IntArray
    response_head: IntArray
    head_sequence: IntArray
    num_logical_tokens: int

    # As ``PackedLayout`` has them.
    is_chunk = False
    shares_tokens = reads_ancestors = True
    num_gathered_kv = 0
    prefill = None

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return self.input_ids.size

    @property
    def segments(self) -> tuple[IntArray, IntArray]:
        """(S,) tokens that each segment sees before its own, and (S,) its own: prefix and responses of every group."""
        start = [at for prefix, *responses in self.group_info for at in (0, *[prefix] * len(responses))]
        return np.array(start), np.array([tokens for group in self.group_info for tokens in group])


def build_padded_layout(tokens: IntArray, offsets: IntArray, prompt_lengths: IntArray) -> PaddedLayout:
    """Put all sequences with the same prompt, wherever they stand, into one line; arguments as of packed layouts."""
    starts, stops = offsets[:-1].tolist(), offsets[1:].tolist()
    prompts = prompt_lengths.tolist()
    groups: dict[bytes, list[int]] = {}
    for s, start in enumerate(starts):
        groups.setdefault(tokens[start : start + prompts[s]].tobytes(), []).append(s)

    # Places of the lines in `tokens`, segment by segment.
    prefixes = [np.arange(starts[m[0]], starts[m[0]] + prompts[m[0]] - 1) for m in groups.values()]
    responses = [[np.arange(starts[s] + prompts[s] - 1, stops[s] - 1) for s in m] for m in groups.values()]
    lines = [np.concatenate([prefix, *group]) for prefix, group in zip(prefixes, responses, strict=True)]
    shape = len(lines), max(map(len, lines))
    input_ids, position_ids, labels = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    position = counted(offsets)
    for g, line in enumerate(lines):
        input_ids[g, : len(line)] = tokens[line]
        position_ids[g, : len(line)] = position[line]
        labels[g, : len(line)] = tokens[line + 1]

    members, parts = [s for m in groups.values() for s in m], [part for group in responses for part in group]
    return PaddedLayout(
        group_info=[[len(prefix), *map(len, group)] for prefix, group in zip(prefixes, responses, strict=True)],
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        head_index=np.concatenate(
            [np.arange(g * shape[1] + len(prefixes[g]), g * shape[1] + len(line)) for g, line in enumerate(lines)]
        ),
        response_index=np.concatenate(parts),
        response_head=np.arange(sum(map(len, parts))),
        head_sequence=np.repeat(members, [len(part) for part in parts]),
        num_logical_tokens=int(offsets[-1]),
    )
