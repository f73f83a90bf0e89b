"""Find turns of a session that do not begin with an earlier turn, the tokens that this costs, and the likely cause."""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_pg_plugin.layout import IntArray

MIN_RUN = 8  # tokens; chat templates write shorter equal runs between any two messages


class Turn(NamedTuple):
    tokens: IntArray
    prompt: int  # length of the context that the agent loop sent, with which the tokens begin


class Break(NamedTuple):
    turn: int
    base: int  # the earlier turn with the longest common prefix
    position: int  # of the first token that differs, in the base and in the prompt of the turn
    runs: list[tuple[int, int, int]]  # equal tokens after it: start in base, start in turn, length
    num_lost: int  # tokens of all runs: they are computed again


def tokenize(texts: Iterable[tuple[str, str]], tokenizer: Any) -> list[Turn]:
    """Return the turns of prompts and responses; a prompt that begins with an earlier text begins with its tokens."""
    turns, known = [], {"": list[int]()}
    for prompt, response in texts:
        begin = max(filter(prompt.startswith, known), key=len)
        known[prompt] = known[begin] + tokenizer.encode(prompt[len(begin) :], add_special_tokens=False)
        known[prompt + response] = tokens = known[prompt] + tokenizer.encode(response, add_special_tokens=False)
        turns.append(Turn(np.array(tokens, dtype=np.int64), len(known[prompt])))
    return turns


def find_breaks(turns: Sequence[Turn]) -> dict[int, Break]:
    """Return the breaks of a session by turn. A turn that begins with a whole earlier turn is a branch, not a break."""
    breaks = {}
    for turn, (tokens, prompt) in enumerate(turns[1:], 1):
        shared = [_num_common(tokens, earlier.tokens) for earlier in turns[:turn]]
        base = max(range(turn), key=lambda i: (shared[i], shared[i] == len(turns[i].tokens), i))
        if shared[base] < min(prompt, len(turns[base].tokens)):
            runs = _equal_runs(turns[base].tokens, tokens[:prompt], shared[base])
            breaks[turn] = Break(turn, base, shared[base], runs, sum(length for *_, length in runs))
    return breaks


def count_tokens(sessions: Iterable[Sequence[Turn]]) -> tuple[int, int]:
    """Return the tokens that the prefix tree of all sessions computes, and those of them that breaks cost."""
    computed = lost = 0
    seen: list[bytes] = []  # sorted, so that neighbors share the most: big-endian bytes are ordered like tokens
    for turns in sessions:
        breaks = find_breaks(turns)
        for turn, (tokens, _) in enumerate(turns):
            place = bisect_left(seen, key := tokens.astype(">u4").tobytes())
            neighbors = [np.frombuffer(other, ">u4") for other in seen[max(place - 1, 0) : place + 1]]
            shared = max((_num_common(tokens, other) for other in neighbors), default=0)
            seen.insert(place, key)
            computed += len(tokens) - max(shared, 1)  # sequences fork one token before they differ
            runs = breaks[turn].runs if turn in breaks else []
            lost += sum(max(start + length - max(start, shared), 0) for _, start, length in runs)
    return computed, lost


def report(sessions: Mapping[str, Sequence[Turn]], decode: Callable[[IntArray], str], most: int) -> str:
    """Return the dedup ratio with and without breaks, and the worst break of ``most`` sessions; '' without breaks."""

    def ratios(of: Collection[Sequence[Turn]]) -> str:
        total, (computed, lost) = sum(len(turn.tokens) for turns in of for turn in turns), count_tokens(of)
        return f"dedup ratio {total / computed:.2f}, without breaks {total / max(computed - lost, 1):.2f}\n"

    breaks = {name: items.values() for name, turns in sessions.items() if (items := find_breaks(turns))}
    broken = f"{len(breaks)} of {len(sessions)} sessions have a turn that does not begin with an earlier turn: "
    text = broken + ratios(sessions.values()) if breaks else ""
    for name in sorted(breaks, key=lambda name: -sum(item.num_lost for item in breaks[name]))[:most]:
        turns, worst = sessions[name], max(breaks[name], key=lambda item: item.num_lost)
        (old, _), (new, prompt), at = turns[worst.base], turns[worst.turn], worst.position
        was, now = ([decode(ids[i:j]) for i, j in ((at, at + 1), (at + 1, at + 16))] for ids in (old, new[:prompt]))
        text += (
            f"session {name}: {ratios([turns])}  turn {worst.turn} differs at token {at:,} and loses {worst.num_lost:,}"
            f" tokens: {_likely_cause(worst, turns, decode)}\n    after {decode(new[max(at - 8, 0) : at])!r}"
            f" turn {worst.base} has {was[0]!r} {was[1]!r}, turn {worst.turn} has {now[0]!r} {now[1]!r}\n"
        )
    return text


def _likely_cause(item: Break, turns: Sequence[Turn], decode: Callable[[IntArray], str]) -> str:
    """Return the likely cause, from the texts between the break and the next equal tokens."""
    (old, _), (new, prompt), at = turns[item.base], turns[item.turn], item.position
    stops = item.runs[0] if item.runs else (len(old), prompt)
    removed, added = decode(old[at : stops[0]]), decode(new[at : stops[1]])
    kept = re.sub(r"(?s)(^((?!<think>).)*?</think>|<think>.*?(</think>|$))\s*", "", removed)  # thoughts may be cut
    if removed == added or (removed and not item.runs and added.startswith(removed)):
        return "the same text in other tokens, a reply was tokenized again"
    stripped = kept != removed and "</think>" not in added and added.strip().startswith(kept.strip())
    is_empty = decode(new[at:prompt]).removeprefix("<think>").lstrip().startswith("</think>")
    if stripped or (is_empty and "</think>" in decode(old[at:])):
        return "thinking removed, by the chat template or the client"
    if not added:
        return "older tokens left out, by truncation or the template"
    first = turns[0].tokens[: turns[0].prompt]
    header = _num_common(first[::-1], new[:prompt][::-1])  # every prompt ends with the header of a reply
    if first[: len(first) - header][-MIN_RUN:].tobytes() in old[:at].tobytes():
        return "a message of the session changed, or was rendered in another way"
    if 2 * item.num_lost < len(old) - at:
        return "another context, of a sub-agent or a summary"
    return "the system prompt, tools or first message changed"


def _num_common(one: IntArray, other: IntArray) -> int:
    return int(np.append(one[: len(other)] != other[: len(one)], True).argmax())


def _equal_runs(old: IntArray, new: IntArray, at: int) -> list[tuple[int, int, int]]:
    """Return equal runs from ``at`` on, in the order of both; difflib takes minutes where tokens repeat."""
    starts: dict[bytes, list[int]] = {}
    for i in range(at, len(old) - MIN_RUN + 1):
        starts.setdefault(old[i : i + MIN_RUN].tobytes(), []).append(i)
    runs, i, j = [], at, at
    while j <= len(new) - MIN_RUN:
        places, length = starts.get(new[j : j + MIN_RUN].tobytes(), []), 1
        if (k := bisect_left(places, i)) < len(places):
            length = _num_common(old[places[k] :], new[j:])
            runs.append((places[k], j, length))
            i = places[k] + length
        j += length
    return runs
