"""The replay buffer of a run, with verl's TransferQueue."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from verl_pg_plugin.rollout.replay_buffer import prompt_replay_buffer


def finish(uid: str) -> float:
    """Add a finished response after half a second and return that time."""
    time.sleep(0.5)
    tag = {"is_prompt": True, "status": "finished", "global_steps": 1}
    transfer_queue.kv_put(key=f"{uid}_0_0", partition_id="train", fields=TensorDict({"x": torch.zeros(1)}), tag={})
    transfer_queue.kv_put(key=uid, partition_id="train", fields=None, tag=tag)
    return time.monotonic()


def test_finished_responses_are_seen_within_200_ms(local_ray: None) -> None:
    transfer_queue.init()
    buffer = prompt_replay_buffer(
        trainer_mode="sync", trainer_config=OmegaConf.create(), max_off_policy_threshold=None,
        max_off_policy_strategy="drop", sampler_kwargs=OmegaConf.create(),
    )  # fmt: skip
    waits = []
    with ThreadPoolExecutor(1) as pool:
        for uid in "abc":
            finished = pool.submit(finish, uid)
            batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
            waits.append(time.monotonic() - finished.result())
            assert batch.keys == [f"{uid}_0_0"]
    assert min(waits) < 0.2  # the fastest of three: other processes share the machine
    transfer_queue.close()
