"""A micro-batch is on the device before verl moves it, whole, and by copies that nothing waits for."""

import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from tests.support import group
from verl_pg_plugin.engine import batch as batches
from verl_pg_plugin.engine.batch import SequenceSelector, on_device
from verl_pg_plugin.synthetic import make_batch

CPU = torch.device("cpu")


def micro_batch() -> TensorDict:
    """With a plain field, positions of several dimensions, and two fields that are one ragged shape."""
    batch = make_batch([*group(9, [4, 7, 2], 1), *group(5, [3], 2)])
    batch["weight"] = torch.arange(4.0)
    rows = SequenceSelector(batch).select([2, 0, 3])
    lengths = rows["input_ids"].offsets().diff().tolist()
    rows["position_ids"] = tu.nested_tensor_from_tensor_list(
        [torch.arange(4 * n).view(4, n) for n in lengths], ragged_idx=2
    )
    rows["twice"] = rows["advantages"] * 2
    tu.assign_non_tensor(rows, uid=np.array(["a", "b", "c"], dtype=object))
    return rows


def assert_same_fields(found: TensorDict, expected: TensorDict) -> None:
    assert set(found.keys()) == set(expected.keys())
    for name, field in expected.items():
        if not isinstance(field, torch.Tensor):
            continue
        if not field.is_nested:
            assert torch.equal(found[name].cpu(), field), name
            continue
        rows = zip(found[name].unbind(), field.unbind(), strict=True)
        assert all(torch.equal(row.cpu(), alone) for row, alone in rows), name


def test_verl_finds_nothing_left_to_move_and_no_field_is_lost() -> None:
    before = micro_batch()
    moved = on_device(before, torch.device(get_device_id()))
    assert moved.to(get_device_id()) is moved
    assert_same_fields(moved, before)
    assert tu.get(moved, "uid").tolist() == ["a", "b", "c"]
    assert tu.get_non_tensor_data(moved, "temperature", default=None) == 1.0
    # torch would refuse to multiply a mask with what it masks, were their ragged shapes two.
    assert torch.equal((moved["twice"] - moved["advantages"]).values(), moved["advantages"].values())
    # Else the first thing that pads a field, verl's loss, would compute these on the device and wait.
    assert (int(moved["responses"]._maybe_min_seqlen), int(moved["responses"]._maybe_max_seqlen)) == (2, 4)


def test_every_number_is_sent_and_none_is_left_to_a_copy_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = tensor.clone()
        sent.append(copy.data_ptr())
        return copy

    monkeypatch.setattr(batches, "send", send)
    before = micro_batch().exclude("position_ids")  # these go as in verl
    moved = on_device(before, CPU)
    assert_same_fields(moved, before)
    parts = [
        part
        for field in moved.values()
        if isinstance(field, torch.Tensor)
        for part in ((field.values(), field.offsets()) if field.is_nested else (field,))
    ]
    assert len(parts) == 2 * 9 + 1, "nine jagged fields and a plain one"
    assert all(part.data_ptr() in sent for part in parts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_host_goes_on_while_the_gpu_is_at_work() -> None:
    device, before = torch.device("cuda", torch.cuda.current_device()), micro_batch()
    expected = on_device(before, device)  # the first one allocates
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(2_000_000_000)  # about a second
        start = time.perf_counter()
        moved = on_device(before, device)
        seconds = time.perf_counter() - start
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seconds < 0.2
    assert moved.to(torch.cuda.current_device()) is moved
    assert_same_fields(moved, before)
    assert_same_fields(expected, before)
