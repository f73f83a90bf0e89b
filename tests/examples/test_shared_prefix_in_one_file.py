"""The core in one file is exact, and the package's layouts and attention op equal it on random batches."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import shared_prefix_in_one_file as core
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.layout.tries import Batch, batch_of, batches, tries
from tests.test_imports import imports_of
from verl_pg_plugin.attention.context import PackedAttention
from verl_pg_plugin.attention.kernels import select_kernel
from verl_pg_plugin.attention.op import AttentionOptions
from verl_pg_plugin.layout import PackedLayout

FILE = Path(core.__file__)
HEAD_DIM = 8


@st.composite
def agents(draw: st.DrawFn) -> Batch:
    """A system prompt, questions, samples of each, and one sequence for every turn of a sample's session."""
    piece = partial(st.lists, st.integers(0, 3), min_size=1)
    pairs, system = [], draw(piece(max_size=4))
    for _ in range(draw(st.integers(1, 3))):
        question = [*system, *draw(piece(max_size=4))]
        for _ in range(draw(st.integers(1, 3))):
            context = question
            for _ in range(draw(st.integers(1, 3))):
                response = draw(piece(max_size=4))
                pairs.append((context, response))
                context = [*context, *response, *draw(piece(max_size=2))]
    return batch_of(*draw(st.permutations(pairs)))


ANY_BATCH = st.one_of(agents(), tries(), batches())


def samples_of(batch: Batch) -> list[core.Sample]:
    """With advantages that differ, so that no two sequences can be exchanged."""
    pairs = enumerate(zip(batch.sequences, batch.prompt_lengths, strict=True))
    return [core.Sample(tokens[:prompt], tokens[prompt:], 1.0 - 0.3 * s) for s, (tokens, prompt) in pairs]


def reading_order(layout: PackedLayout) -> np.ndarray:
    """Of the layout's response tokens: that of the batch, where verl reads them."""
    return np.argsort(layout.response_index)


@given(ANY_BATCH)
def test_layouts_equal_those_of_the_file(batch: Batch) -> None:
    layout, packed = batch.layout(), core.pack(samples_of(batch))
    mask_TT = core.ancestor_mask(packed.parent_T)
    segments = core.cut_into_segments(packed.parent_T, mask_TT)
    assert layout.input_ids.tolist() == packed.token_T.tolist()
    assert layout.labels.tolist() == packed.label_T.tolist()
    assert layout.position_ids.tolist() == packed.position_T.tolist()
    assert layout.cu_seqlens_q.tolist() == [*(segment.start for segment in segments), len(mask_TT)]
    assert layout.kv_index.tolist() == torch.cat([segment.keys for segment in segments]).tolist()
    predictors = [path[n - 1 :] for n, path in zip(batch.prompt_lengths, packed.paths, strict=True)]
    assert layout.head_index.tolist() == torch.cat(predictors).unique().tolist()
    assert layout.head_index[layout.response_head[reading_order(layout)]].tolist() == torch.cat(predictors).tolist()
    logical = [
        range(o + n - 1, o + len(path))
        for o, n, path in zip(batch.offsets[:-1], batch.prompt_lengths, packed.paths, strict=True)
    ]
    assert sorted(layout.response_index.tolist()) == [place for of_sequence in logical for place in of_sequence]


@given(ANY_BATCH, st.integers(0, 999))
@example(batch_of(([1], []), ([1, 2], [3])), 0)
@settings(max_examples=15)
def test_log_probs_and_gradients_of_the_op_and_of_the_file_are_those_of_each_sequence_alone(batch, seed) -> None:
    torch.manual_seed(seed)
    model, samples = core.Decoder(vocab_size=1000).double(), samples_of(batch)
    packed, layout = core.pack(samples), batch.layout()
    mask_TT = core.ancestor_mask(packed.parent_T)
    op, options = PackedAttention(layout, select_kernel("sdpa", "cpu")), AttentionOptions(HEAD_DIM**-0.5)
    expected = core.outcome(model, samples, core.log_probs_alone(model, samples))
    for attend in (
        partial(core.masked_attention, mask_QK=mask_TT),
        partial(core.varlen_attention, segments=core.cut_into_segments(packed.parent_T, mask_TT)),
    ):
        log_probs = core.packed_log_probs(model, samples, packed, attend)
        torch.testing.assert_close(core.outcome(model, samples, log_probs), expected, rtol=1e-10, atol=1e-10)
    # The package's way: its arrays alone.
    token_T, position_T, label_T = map(torch.tensor, (layout.input_ids, layout.position_ids, layout.labels))
    hidden_TC = model(token_T, position_T, partial(op.attend_packed, options=options))
    log_prob_N = model.log_probs(hidden_TC[layout.head_index], label_T[layout.head_index])
    read_by_verl = log_prob_N[layout.response_head[reading_order(layout)]]
    responses = read_by_verl.split([len(sample.response) for sample in samples])
    torch.testing.assert_close(core.outcome(model, samples, responses), expected, rtol=1e-10, atol=1e-10)


def test_the_file_runs_with_torch_alone_and_prints_what_it_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert {name.partition(".")[0] for name in imports_of(FILE)} - sys.stdlib_module_names == {"torch"}
    core.main()
    drawing, _, comparison = capsys.readouterr().out.partition("largest difference from each sequence alone")
    assert drawing.startswith("24 packed tokens instead of 68")
    assert "  y     .        ....4.    ###........#########.##.\n" in drawing, "a token of the second turn"
    errors = [line.split()[-2:] for line in comparison.splitlines()[1:]]
    assert len(errors) == 10 + len(list(core.Decoder(vocab_size=2).parameters()))
    assert max(float(error) for line in errors for error in line) < 1e-12
