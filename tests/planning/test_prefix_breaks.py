"""Turns that do not begin with an earlier turn: the position, the cost and the cause, with logic of chat templates.

The templates here do to earlier turns what those of Qwen3, Qwen3.5 and Llama 3 do, and nothing else. The tokenizer is a
byte-level BPE like theirs, trained on a few words.
"""

from collections.abc import Callable

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verl_pg_plugin.layout import build_prefix_order
from verl_pg_plugin.planning.prefix_breaks import MIN_RUN, Turn, count_tokens, find_breaks, report, tokenize

QWEN3 = """
{%- set query = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}
{%- set query.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' and loop.index0 < query.last %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\n' }}"""
QWEN3_5 = QWEN3 + "{{- '<think>\n' }}"
LLAMA3 = """
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"""
ENDS = {QWEN3: "<|im_end|>", QWEN3_5: "<|im_end|>", LLAMA3: "<|eot_id|>"}

SPECIAL = ["<|begin_of_text|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ADDED = ["<think>", "</think>", "<tool_response>", "</tool_response>"]
WORDS = "the test of module path fails because index state was not set before value returns from main loop"


def text(seed: int, length: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS.split(), length))


THINKING = "thinking removed, by the chat template or the client"
LEFT_OUT = "older tokens left out, by truncation or the template"
SYSTEM, TASK = text(1, 30), text(2, 20)
Messages = list[dict[str, str]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    bpe.train_from_iterator([text(0, 500), "\nassistant" * 99], trainer)  # as in real vocabularies, a header is short
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=SPECIAL[0])


Edit = Callable[[Messages], Messages]


def play(
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    replies: list[str],
    queries: list[str],
    edit: Edit = list,
    apart: int = 0,
) -> list[Turn]:
    """Return a session whose agent loop renders all messages for each turn, after ``edit``.

    A model may sample other tokens than the tokenizer's: the first ``apart`` characters of a reply are tokens apart.
    """
    turns, messages = [], [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for reply, query in zip(replies, queries, strict=True):
        options = {"chat_template": template, "add_generation_prompt": True, "return_dict": False}
        prompt = tokenizer.apply_chat_template(edit(messages), **options)
        parts = filter(None, (reply[:apart], reply[apart:] + ENDS[template]))
        response = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
        turns.append(Turn(np.array(prompt + response), len(prompt)))
        opened = "<think>\n" if template == QWEN3_5 else ""
        messages += [{"role": "assistant", "content": opened + reply}, {"role": "user", "content": query}]
    return turns


def thought(seed: int, opens: bool = True) -> str:
    return f"{'<think>' + chr(10) if opens else ''}{text(seed, 20)}\n</think>\n\n{text(seed + 50, 15)}"


REPLIES = [text(seed, 15) for seed in (10, 11, 12)]
QUERIES = [text(seed, 10) for seed in (20, 21, 22)]
RESULTS = [f"<tool_response>\n{query}\n</tool_response>" for query in QUERIES]


def show(tokenizer: PreTrainedTokenizerFast, turns: list[Turn]) -> str:
    return report({"x_0": turns}, tokenizer.decode, most=1)


@pytest.mark.parametrize(
    ("template", "replies", "queries"),
    [
        (LLAMA3, REPLIES, QUERIES),
        (QWEN3, REPLIES, QUERIES),
        (QWEN3, [thought(seed) for seed in (30, 31, 32)], RESULTS),  # thinking is kept up to the next question
        (QWEN3_5, [thought(seed, opens=False) for seed in (30, 31, 32)], RESULTS),
    ],
)
def test_sessions_whose_turns_begin_with_the_last_turn_lose_nothing(tokenizer, template, replies, queries) -> None:
    turns = play(tokenizer, template, replies, queries)
    assert find_breaks(turns) == {}
    assert count_tokens([turns])[1] == 0
    assert show(tokenizer, turns) == ""


def drop_oldest(messages: Messages) -> Messages:
    return [*messages[:2], *messages[-2:]] if len(messages) > 4 else messages


def summarize(messages: Messages) -> Messages:
    return [messages[0], {"role": "user", "content": text(99, 40)}] if len(messages) > 2 else messages


def add_tools(messages: Messages) -> Messages:
    tools = " ".join(text(seed, 15) for seed in range(60, 62 + len(messages)))
    return [{"role": "system", "content": f"{SYSTEM}\n{tools}\nEnd of tools."}, *messages[1:]]


def forget_thinking(messages: Messages) -> Messages:
    """Return what a template renders for a client that drops thinking: an empty thought, or none if it had no end."""

    def forget(content: str) -> str:
        _, end, answer = content.rpartition("</think>")
        return f"<think>\n\n{end}{answer}" if end else answer.removeprefix("<think>\n")

    return [{**m, "content": forget(m["content"])} for m in messages]


def budget(messages: Messages) -> Messages:
    task = f"{TASK}\nLeft: {9 - len(messages)} calls"
    return [messages[0], {"role": "user", "content": task}, *messages[2:]]


def shorten(messages: Messages) -> Messages:
    return [m if m["content"] != QUERIES[0] or len(messages) < 5 else {**m, "content": "(old)"} for m in messages]


@pytest.mark.parametrize(
    ("template", "replies", "queries", "edit", "cause"),
    [
        (QWEN3, [thought(30), thought(31)], QUERIES, list, THINKING),
        (QWEN3_5, [thought(30, False), thought(31, False)], QUERIES, list, THINKING),
        (QWEN3, [thought(30), thought(31)], RESULTS, forget_thinking, THINKING),
        (QWEN3_5, [thought(30, False)] * 2, RESULTS, forget_thinking, THINKING),
        (QWEN3_5, REPLIES, QUERIES, forget_thinking, THINKING),
        (QWEN3, [REPLIES[0], thought(30), "yes"], QUERIES, drop_oldest, LEFT_OUT),
        (LLAMA3, REPLIES, QUERIES, drop_oldest, LEFT_OUT),
        (LLAMA3, REPLIES, QUERIES, summarize, "another context, of a sub-agent or a summary"),
        (QWEN3_5, [REPLIES[0]] * 3, QUERIES, add_tools, "the system prompt, tools or first message changed"),
        (LLAMA3, REPLIES, QUERIES, shorten, "a message of the session changed, or was rendered in another way"),
    ],
)
def test_the_likely_cause_is_named(tokenizer, template, replies, queries, edit, cause) -> None:
    turns = play(tokenizer, template, replies, queries[: len(replies)], edit)
    broken = next(iter(find_breaks(turns).values()))
    assert broken.base == broken.turn - 1
    old, new = turns[broken.base].tokens, turns[broken.turn].tokens
    assert (old[: broken.position] == new[: broken.position]).all()
    assert old[broken.position] != new[broken.position]
    assert f": {cause}" in show(tokenizer, turns)


@pytest.mark.parametrize("template", [QWEN3, LLAMA3])
def test_a_changed_end_of_the_first_message_is_named_without_special_tokens(tokenizer, template) -> None:
    turns = play(tokenizer, template, REPLIES, QUERIES, budget)
    parts = [(tokens[:prompt], tokens[prompt:]) for tokens, prompt in turns]
    texts = [tuple(tokenizer.decode(part, skip_special_tokens=True) for part in pair) for pair in parts]
    assert ": the system prompt, tools or first message changed" in show(tokenizer, tokenize(texts, tokenizer))


def test_a_reply_that_was_tokenized_again_is_shown_with_its_tokens(tokenizer) -> None:
    turns = play(tokenizer, QWEN3, REPLIES, QUERIES, apart=1)
    (old, prompt), new = turns[0], turns[1].tokens
    first = find_breaks(turns)[1]
    assert (first.turn, first.base, first.position) == (1, 0, prompt)
    assert first.num_lost == len(old) - prompt - 2, "all of the reply but its two tokens that became one"
    out = show(tokenizer, turns)
    assert "the same text in other tokens, a reply was tokenized again\n" in out
    assert f"turn 0 has {tokenizer.decode(old[prompt])!r} '" in out
    assert f"turn 1 has {tokenizer.decode(new[prompt])!r} '" in out


def ids(*spans: tuple[int, int]) -> np.ndarray:
    return np.concatenate([np.arange(*span) for span in spans])


def test_lost_tokens_are_those_of_the_prompt_that_an_earlier_turn_has() -> None:
    first, second = Turn(ids((0, 100)), 60), Turn(ids((0, 50), (60, 100), (200, 230)), 110)
    (broken,) = find_breaks([first, second]).values()
    assert (broken.turn, broken.base, broken.position, broken.num_lost) == (1, 0, 50, 40)
    # Sequences fork one token before they differ: the second shares 49 tokens, and predicts nothing from its last.
    assert count_tokens([[first, second]]) == (99 + (119 - 49), 40)
    assert count_tokens([[first, second]] * 2) == (99 + (119 - 49), 40), "equal sessions share these too"
    whole = Turn(ids((0, 100), (200, 230)), 120)
    assert count_tokens([[first, whole]]) == (129, 0)
    swapped = Turn(ids((0, 50), (75, 100), (51, 75), (80, 100), (200, 230)), 140)
    assert count_tokens([[first, swapped]])[1] == 25, "each once, in their order"
    repeats = Turn(ids((0, 50), (60, 100)), 52)
    assert count_tokens([[first, repeats]])[1] == 0, "responses are new"
    few = Turn(ids((0, 50), (60, 60 + MIN_RUN - 1), (200, 230)), 80)
    assert count_tokens([[first, few]])[1] == 0, "shorter than a run"


@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(ids((0, 60)), id="the same prompt again"),
        pytest.param(ids((0, 100), (300, 310)), id="another branch"),
        pytest.param(ids((0, 40)), id="an earlier context"),
    ],
)
def test_turns_that_share_all_they_can_do_not_break(prompt) -> None:
    branch, response = Turn(ids((0, 100), (200, 220)), 110), ids((400, 410))
    again = Turn(np.append(prompt, response), len(prompt))
    assert find_breaks([Turn(ids((0, 100)), 60), branch, again]) == {}


def test_a_session_that_returns_from_a_sub_agent_breaks_once() -> None:
    main, sub, back = ids((0, 100)), ids((500, 580)), ids((0, 100), (600, 650))
    turns = [Turn(main, 60), Turn(sub, 70), Turn(back, 140)]
    (broken,) = find_breaks(turns).values()
    assert (broken.turn, broken.num_lost) == (1, 0), "nothing is computed again"


def test_computed_tokens_are_those_of_the_prefix_tree() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sessions = [[Turn(rng.integers(0, 2, rng.integers(1, 12)), 1) for _ in range(3)] for _ in range(4)]
        tokens = [turn.tokens for turns in sessions for turn in turns]
        order = build_prefix_order(np.concatenate(tokens), np.cumsum([0, *map(len, tokens)]))
        computed, lost = count_tokens(sessions)
        assert computed == order.num_new.sum()
        assert 0 <= lost <= computed


def test_a_prompt_that_continues_a_turn_keeps_its_tokens(tokenizer) -> None:
    """A tokenizer would merge the last letters of a reply with the text that follows."""

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    prompt, reply, rest = "the test", " of mod", "ule path"
    turns = tokenize([(prompt, reply), (prompt + reply + rest, "")], tokenizer)
    assert encode(prompt + reply + rest) != encode(prompt) + encode(reply) + encode(rest)
    assert turns[1].tokens.tolist() == encode(prompt) + encode(reply) + encode(rest)
    assert find_breaks(turns) == {}
