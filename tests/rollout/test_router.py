"""Request routing: prompts keep their servers, servers share the load, and verl's protocol holds."""

import inspect
import random
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.router import GlobalRequestLoadBalancer, RequestLoadBalancer, _load_router_yaml

from tests.rollout.simulation import long_tailed, simulate
from verl_pg_plugin import compat
from verl_pg_plugin.rollout.router import GROUP_SEQUENCES, SEQUENCE_TOKENS, PromptRouter

A, B = [1, 2, 3], [4, 5, 6, 7]


def make_router(servers: int = 4) -> PromptRouter:
    return PromptRouter({f"s{rank}": f"handle of s{rank}" for rank in range(servers)}, {})


def servers_of(router: PromptRouter, prompt_ids: Any, *request_ids: str) -> list[str]:
    return [router.acquire_server(request_id, prompt_ids=prompt_ids)[0] for request_id in request_ids]


def group(router: PromptRouter, prompt_ids: Any, name: str, n: int = 8) -> set[str]:
    return set(servers_of(router, prompt_ids, *(f"{name}{sample}" for sample in range(n))))


@pytest.mark.parametrize(
    ("prompts", "slowest_over_mean", "speedup"),
    # A group is on one server, so with few groups some servers have none.
    [(1, 8.0, 0.95), (8, 2.3, 1.0), (32, 1.6, 1.1), (256, 1.25, 1.6)],
)
def test_prompts_are_prefilled_once_and_load_is_balanced(prompts: int, slowest_over_mean, speedup) -> None:
    random.seed(0)  # verl's router draws from servers with equal load
    requests = long_tailed(prompts)
    ours = simulate(lambda servers: PromptRouter(servers, {}), requests)
    verls = simulate(GlobalRequestLoadBalancer, requests)
    assert ours.prefilled_over_distinct <= 1.05
    assert verls.prefilled_over_distinct > 4
    assert ours.slowest_over_mean <= slowest_over_mean
    assert ours.seconds <= verls.seconds / speedup


@pytest.mark.parametrize("prompt_tokens", [300, 8192])
@pytest.mark.parametrize(("n", "homes"), [(16, 1.25), (64, 4.0)])
def test_large_groups_are_spread_over_servers(n: int, homes: float, prompt_tokens: int) -> None:
    random.seed(0)
    for prompts in (1, 12):
        requests = long_tailed(prompts, n, prompt_tokens)
        ours = simulate(lambda servers: PromptRouter(servers, {}), requests)
        verls = simulate(GlobalRequestLoadBalancer, requests)
        assert ours.prefilled_over_distinct <= homes
        assert ours.seconds <= 1.06 * verls.seconds


def test_few_prompts_spread_and_cleared_sessions_move_together() -> None:
    router = make_router(4)
    homes = [group(router, [prompt] * 100, f"{prompt}-") for prompt in range(4)]
    assert sorted(homes, key=sorted) == [{"s0"}, {"s1"}, {"s2"}, {"s3"}]
    router = make_router(2)
    group(router, A, "a")
    assert router.clear_sticky_cache() == {"cleared_entries": 8, "server_loads": {"s0": 8, "s1": 0}}
    for sample in range(1, 8):
        router.release_server("s0", request_id=f"a{sample}")
    # verl resumes an aborted request with its response as part of the prompt.
    resumed = {router.acquire_server(f"a{sample}", prompt_ids=[*A, 8, sample])[0] for sample in range(8)}
    assert resumed == {"s1"}


def test_prompts_of_an_overloaded_server_are_copied() -> None:
    router = make_router(2)
    most = GROUP_SEQUENCES + 1  # the comparison counts the prompt's tokens on both servers
    assert group(router, A, "first", most) == {"s0"}
    assert servers_of(router, A, "next", "after") == ["s1", "s1"]
    metrics = router.take_metrics()
    assert metrics.pop("prefix_grouper/rollout/requests_per_group") == (most + 2) / 2
    assert metrics == dict.fromkeys(
        ("prefix_grouper/rollout/prefilled_over_distinct", "prefix_grouper/rollout/servers_per_prompt"), 2
    )
    assert router.take_metrics() == {}, "metrics start over"


def test_load_counts_tokens_until_release() -> None:
    router = make_router(2)
    long, short = [7] * (4 * SEQUENCE_TOKENS), [8]
    assert servers_of(router, long, "long") == ["s0"]
    assert group(router, short, "short", 4) == {"s1"}
    assert servers_of(router, [9], "other") == ["s1"], "4,100 tokens and not four requests to one"
    assert router.get_status()["servers"] == {"s0": 1, "s1": 5}
    for request_id in ("short0", "short1", "short2", "short3", "other", "other", "unknown"):
        router.release_server("s1", request_id=request_id)
    router.release_server("s0", request_id="long")
    assert router.get_total_inflight() == 0
    assert [server.load for server in router._servers.values()] == [0, 0]


def test_sessions_stay_and_idle_prompts_are_forgotten() -> None:
    router = make_router(2)
    assert servers_of(router, A, "session") == ["s0"]
    router.acquire_server("other", prompt_ids=B)
    router.release_server("s0", request_id="session")
    assert servers_of(router, A + [9] * 5000, "session") == ["s0"]
    assert router._servers["s0"].load == SEQUENCE_TOKENS + len(A)
    assert servers_of(router, A, "sibling") == ["s0"], "sessions of a prompt share a server between turns"
    # Weights may change when nothing is in flight, which verl does not announce in most modes.
    router = make_router(2)
    servers_of(router, A, "a")
    servers_of(router, B, "b")
    router.release_server("s0", request_id="a")
    assert servers_of(router, A, "a2") == ["s0"]
    router.release_server("s0", request_id="a2")
    router.release_server("s1", request_id="b")
    assert servers_of(router, [*A, 8], "a") == ["s0"], "next turn of a session"
    router.release_server("s0", request_id="a")
    assert servers_of(router, B, "b2") == ["s0"], "the least loaded server"


def test_removed_servers_fail_over_and_come_back_empty() -> None:
    router = make_router(3)
    assert group(router, A, "a") == {"s0"}
    assert group(router, B, "b") == {"s1"}
    router.remove_servers(["s0", "never there"])
    assert router.get_all_servers() == ["s1", "s2"]
    assert group(router, A, "a") == {"s2"}
    assert group(router, A, "new") == {"s2"}
    router.release_server("s0", request_id="a0")
    assert router.get_status()["servers"] == {"s1": 8, "s2": 16}
    router = make_router(2)
    group(router, A, "a")
    group(router, B, "b")
    router.remove_servers(["s0"])
    router.add_servers({"s0": "new handle"})
    assert router.acquire_server("a0", prompt_ids=A) == ("s0", "new handle"), "the least loaded"
    assert router.get_total_inflight() == 9
    router.release_server("s0", request_id="a1")  # from before the removal
    assert router.get_total_inflight() == 9
    # A kept handle would keep the server's actor alive.
    handle = type("Handle", (), {})()
    router = PromptRouter({"s": handle}, {})
    servers_of(router, A, "a")
    ended = weakref.ref(handle)
    del handle
    router.remove_servers(["s"])
    assert ended() is None


def test_added_servers_keep_their_load_and_end_refusals() -> None:
    router = make_router(2)
    group(router, A, "a")
    router.add_servers({"s0": "new handle"})
    assert router.acquire_server("a0", prompt_ids=A) == ("s0", "new handle")
    assert router.get_status()["servers"] == {"s0": 9, "s1": 0}
    router = make_router(0)
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        router.acquire_server("a", prompt_ids=A)
    router.add_servers({"s": None})
    assert servers_of(router, A, "a") == ["s"]


def test_any_prompt_type_is_routed_and_released() -> None:
    arrays = np.array([1, 2]), torch.tensor([1, 2]), torch.tensor(1)
    for prompt_ids in (None, [], 7, [[1], [2]], *arrays, "text", {"a": 1}, [1.5]):
        router = make_router(2)
        names = servers_of(router, prompt_ids, "a", "b")
        for name, request_id in zip(names, "ab", strict=True):
            router.release_server(name, request_id=request_id)
        assert [server.load for server in router._servers.values()] == [0, 0], prompt_ids


def test_prompts_are_compared_by_token_ids_and_missing_ones_by_load() -> None:
    router = make_router(2)
    assert router.acquire_server("a") == ("s0", "handle of s0")
    assert servers_of(router, None, "b", "c", "d") == ["s1", "s0", "s1"]
    assert servers_of(router, [], "e", "f") == ["s0", "s1"]
    router = make_router(4)
    names = [router.acquire_server(f"{kind}", prompt_ids=kind(A))[0] for kind in (list, tuple, np.array)]
    assert len(set(names)) == 1


def test_router_yaml_names_a_class_with_verls_protocol() -> None:
    path = Path(compat.__file__).parent / "rollout/router.yaml"
    named = load_class_from_fqn(_load_router_yaml(str(path))["router_class"], "router")
    assert named is PromptRouter
    methods = {name: method for name, method in vars(RequestLoadBalancer).items() if not name.startswith("_")}
    assert {f"verl.workers.rollout.router.RequestLoadBalancer.{name}" for name in methods} <= compat.SIGNATURES.keys()
    for name, method in methods.items():
        wanted, there = (inspect.signature(function).parameters for function in (method, getattr(PromptRouter, name)))
        assert wanted.keys() <= there.keys(), name
    status = make_router().get_status()
    assert GlobalRequestLoadBalancer({}).get_status().keys() <= status.keys()
