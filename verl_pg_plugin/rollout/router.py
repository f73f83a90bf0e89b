"""Router that sends the samples of a prompt to one server, which prefills and stores the prompt once.

verl's own router sends each new request to the server with the fewest requests, so n samples reach up to n servers.
Both implement ``verl.workers.rollout.router.RequestLoadBalancer``.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cachetools import LRUCache

SEQUENCE_TOKENS = 1024
"""Load of a request without its prompt, in prompt tokens. A sequence adds 0.055 ms to a decode step (4B, one H200). A
prompt token adds 1/1,034 of that: 0.29 ms / 8,192 to read it, and 1 s / 55,000 / 1,024 steps to prefill it."""
GROUP_SEQUENCES = 16
"""Sequences by which a home may exceed the least loaded server, in addition to the prompt's tokens. In
tests/rollout/simulation.py, times differ by less than 2% from 12 to 32; 4 prefills a third more tokens."""
CACHE_SIZE = 100_000  # sessions and prompts; verl's router keeps 10,000 sessions, fewer than a large batch has


class Prompt(NamedTuple):
    """Prompt of a session's first turn. Without token ids it has 0 tokens and equals no other prompt."""

    key: Hashable
    tokens: int

    @classmethod
    def of(cls, prompt_ids: Any) -> "Prompt":
        try:
            ids = tuple(prompt_ids)
            return cls(hash(ids) if ids else object(), len(ids))
        except TypeError:
            return cls(object(), 0)


@dataclass(eq=False)
class Server:
    """A server from ``add_servers`` to ``remove_servers``. If added again, it is new, with an empty prefix cache."""

    name: str
    handle: Any
    load: int = 0  # tokens of distinct prompts, and SEQUENCE_TOKENS for each request
    running: dict[Hashable, list[Prompt]] = field(default_factory=dict)  # by request id
    requests: Counter[Prompt] = field(default_factory=Counter)

    def start(self, request_id: Hashable, prompt: Prompt) -> None:
        self.running.setdefault(request_id, []).append(prompt)
        self.load += SEQUENCE_TOKENS + (0 if self.requests[prompt] else prompt.tokens)
        self.requests[prompt] += 1

    def finish(self, request_id: Hashable) -> None:
        """Subtract the load that ``start`` added; ignore a request that is not running."""
        if turns := self.running.get(request_id):
            prompt = turns.pop()
            self.requests[prompt] -= 1
            self.load -= SEQUENCE_TOKENS + (0 if self.requests[prompt] else prompt.tokens)
            if not turns:
                del self.running[request_id]
            if not self.requests[prompt]:
                del self.requests[prompt]


class PromptRouter:
    """Sends a known request id to its server, and a new one to a home of its prompt or to the least loaded server.

    Homes are the servers that prefilled a prompt. They are cleared whenever no request is in flight: a synchronous
    trainer then changes weights, which empties prefix caches. A prompt's key does not include images.
    """

    def __init__(self, servers: dict[str, Any], yaml_config: dict[str, Any]) -> None:
        self._servers: dict[str, Server] = {}
        self._server_of: LRUCache[Hashable, Server] = LRUCache(CACHE_SIZE)  # by request id
        self._prompt_of: LRUCache[Hashable, Prompt] = LRUCache(CACHE_SIZE)  # by request id
        self._homes: LRUCache[Prompt, set[Server]] = LRUCache(CACHE_SIZE)
        self._counts: Counter[str] = Counter()  # since ``take_metrics``
        self.add_servers(servers)

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def acquire_server(self, request_id: Hashable, prompt_ids: Any = None, **extra: Any) -> tuple[str, Any]:
        """Return the server's id and handle for a request, and count the request until ``release_server``."""
        if not self._servers:
            raise RuntimeError("No available servers in load balancer")  # verl's client retries on this message
        # clear_sticky_cache keeps this: an aborted request resumes with its response appended to its prompt.
        prompt = self._prompt_of.setdefault(request_id, Prompt.of(prompt_ids))
        server = self._server_of.get(request_id)
        if server is None or self._servers.get(server.name) is not server:
            server = self._server_of[request_id] = self._choose(prompt)
        self._homes.setdefault(prompt, set()).add(server)
        server.start(request_id, prompt)
        return server.name, server.handle

    def _choose(self, prompt: Prompt) -> Server:
        """Return the server of a new request and count the tokens that it prefills."""
        servers, known = list(self._servers.values()), self._homes.get(prompt, ())
        chosen = least = min(servers, key=lambda server: server.load)
        if homes := [server for server in servers if server in known]:
            home = min(homes, key=lambda server: server.load)
            if home.load - least.load <= prompt.tokens + GROUP_SEQUENCES * SEQUENCE_TOKENS:
                chosen = home
        self._counts["requests"] += 1
        if not known:
            self._counts.update(prompts=1, prompt_tokens=prompt.tokens)
        if chosen not in known:
            self._counts.update(homes=1, prefilled_tokens=prompt.tokens)
        return chosen

    def release_server(self, server_id: str, request_id: Hashable = None) -> None:
        if server := self._servers.get(server_id):
            server.finish(request_id)
            if not any(server.running for server in self._servers.values()):
                self._homes.clear()

    def add_servers(self, servers: dict[str, Any]) -> None:
        for name, handle in servers.items():
            self._servers.setdefault(name, Server(name, handle)).handle = handle

    def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            if server := self._servers.pop(name, None):
                server.handle = None  # sessions refer to the server, and a handle keeps its actor alive

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Clear the servers of sessions and prompts; keep prompts, so that samples of a prompt meet again."""
        cleared = len(self._server_of)
        self._server_of.clear()
        self._homes.clear()
        return {"cleared_entries": cleared, "server_loads": self.get_status()["servers"]}

    def take_metrics(self) -> dict[str, float]:
        """Return metrics of prompt sharing since the last call; empty without a prompt."""
        counts, self._counts = self._counts, Counter()
        if not (counts["prompt_tokens"] and counts["homes"]):
            return {}
        return {
            "prefix_grouper/rollout/prefilled_over_distinct": counts["prefilled_tokens"] / counts["prompt_tokens"],
            "prefix_grouper/rollout/servers_per_prompt": counts["homes"] / counts["prompts"],
            "prefix_grouper/rollout/requests_per_group": counts["requests"] / counts["homes"],
        }

    def get_all_servers(self) -> list[str]:
        return list(self._servers)

    def get_total_inflight(self) -> int:
        return sum(server.requests.total() for server in self._servers.values())

    def get_status(self) -> dict[str, Any]:
        """Return requests in flight by server, under the keys of verl's router."""
        counts = {name: server.requests.total() for name, server in self._servers.items()}
        totals = {"total_inflight": sum(counts.values()), "active_servers": len(counts)}
        return {"servers": counts, **totals, "registered_handles": list(counts)}
