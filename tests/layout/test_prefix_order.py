"""The sorted order that the layout and the micro-batches are both cut from."""

from hypothesis import given

from tests.layout.tries import Batch, batch_of, batches


@given(batches(with_classes=True))
def test_neighbours_share_what_the_whole_trie_shares(batch: Batch) -> None:
    """If a sequence shared more with one further up, rows would be computed twice."""
    order = batch.order()
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for sequence, num_rows, num_shared in zip(order.sequences, order.num_tokens, order.num_shared, strict=True):
        rows = batch.take([int(sequence)]).rows()
        assert (num_rows, num_shared) == (len(rows), len(rows & seen))
        seen |= rows
    assert int(order.num_new.sum()) == len(seen)


@given(batches(with_classes=True))
def test_every_sequence_appears_once_sorted_by_its_tokens(batch: Batch) -> None:
    order = batch.order()
    assert sorted(order.sequences.tolist()) == list(range(len(batch.sequences)))
    keys = [(batch.class_of(s), batch.sequences[s]) for s in order.sequences.tolist()]
    assert keys == sorted(keys)


def test_tokens_that_take_several_bytes_are_sorted_as_numbers() -> None:
    """Ranks of another byte order would cut the same batch otherwise."""
    order = batch_of(((256, 1), (0,)), ((1, 1), (0,)), ((65536, 1), (0,)), ((255, 1), (0,))).order()
    assert order.sequences.tolist() == [1, 3, 0, 2]
