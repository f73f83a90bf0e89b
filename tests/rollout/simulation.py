"""Simulation of a router and its rollout servers, in seconds; the costs are those of a 4B model on one H200."""

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

PREFILL_TOKENS_PER_SECOND = 55_000
STEP, STEP_OF_SEQUENCE, STEP_OF_PROMPT_TOKEN = 5e-3, 5.5e-5, 2.9e-4 / 8192  # seconds of a decode step
MAX_NUM_SEQS = 256  # verl's default


@dataclass(frozen=True)
class Request:
    id: str
    prompt_ids: range  # no two prompts have a token in common
    response_tokens: int


@dataclass
class SimulatedServer:
    """Prefills prompts that it has not cached, and decodes all sequences together, reading shared prompts once."""

    release: Callable[[str], None]
    seconds: float = 0.0
    steps: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[tuple[int, str, range]] = field(default_factory=list)  # a heap: last step, request id, prompt
    prompts: Counter[range] = field(default_factory=Counter)  # of running requests
    cached: set[range] = field(default_factory=set)
    response_tokens: int = 0

    def advance(self, until: float) -> None:
        while self.seconds < until:
            while self.waiting and len(self.running) < MAX_NUM_SEQS:
                request = self.waiting.popleft()
                if request.prompt_ids not in self.cached:
                    self.cached.add(request.prompt_ids)
                    self.seconds += len(request.prompt_ids) / PREFILL_TOKENS_PER_SECOND
                self.prompts[request.prompt_ids] += 1
                self.response_tokens += request.response_tokens
                last_step = self.steps + request.response_tokens
                heapq.heappush(self.running, (last_step, request.id, request.prompt_ids))
            if not self.running:
                return
            read = sum(len(prompt_ids) for prompt_ids in self.prompts)
            step = STEP + STEP_OF_SEQUENCE * len(self.running) + STEP_OF_PROMPT_TOKEN * read
            steps = self.running[0][0] - self.steps
            if until < math.inf:
                steps = min(steps, math.ceil((until - self.seconds) / step))
            self.seconds += steps * step
            self.steps += steps
            while self.running and self.running[0][0] == self.steps:
                _, request_id, prompt_ids = heapq.heappop(self.running)
                self.prompts -= Counter([prompt_ids])
                self.release(request_id)


@dataclass(frozen=True)
class Outcome:
    prefilled_over_distinct: float
    slowest_over_mean: float  # response tokens of servers
    seconds: float  # until the last response


def long_tailed(prompts: int, n: int = 8, prompt_tokens: int = 8192, response_tokens: int = 1024, seed: int = 0):
    """Return ``n`` requests a prompt as verl's eight workers send them: chunks of prompts, each chunk in order.

    Lengths have these means. Prompt lengths are log-normal; so are response lengths, correlated within a prompt.
    """
    rng = random.Random(seed)

    def spread(sigma: float) -> float:
        return rng.lognormvariate(-(sigma**2) / 2, sigma)

    workers: list[list[Request]] = [[] for _ in range(min(8, prompts))]
    for prompt in range(prompts):
        first, tokens, of_prompt = prompt << 32, 1 + int(prompt_tokens * spread(0.5)), spread(0.4)
        for sample in range(n):
            response = 1 + min(8 * response_tokens, int(response_tokens * of_prompt * spread(0.6)))
            request = Request(f"{prompt}-{sample}", range(first, first + tokens), response)
            workers[prompt * len(workers) // prompts].append(request)
    requests = []
    while workers := [requests_left for requests_left in workers if requests_left]:
        requests.append(rng.choice(workers).pop(0))
    return requests


def simulate(make_router: Callable[[dict[str, Any]], Any], requests: list[Request], servers: int = 8) -> Outcome:
    """Send a request each millisecond where a router of verl's protocol says."""
    sent_to: dict[str, str] = {}
    router = make_router({f"server-{rank}": None for rank in range(servers)})
    simulated = {
        name: SimulatedServer(lambda request_id: router.release_server(sent_to[request_id], request_id=request_id))
        for name in router.get_all_servers()
    }
    for milliseconds, request in enumerate(requests):
        for server in simulated.values():
            server.advance(milliseconds / 1000)
        fields = {"prompt_ids": request.prompt_ids} if router.require_acquire_fields() else {}
        sent_to[request.id], _ = router.acquire_server(request.id, **fields)
        server = simulated[sent_to[request.id]]
        server.waiting.append(request)
        server.seconds = max(server.seconds, milliseconds / 1000)
    for server in simulated.values():
        server.advance(math.inf)
    assert router.get_total_inflight() == 0
    response_tokens = [server.response_tokens for server in simulated.values()]
    prefilled = sum(len(prompt_ids) for server in simulated.values() for prompt_ids in server.cached)
    return Outcome(
        prefilled / sum(map(len, {request.prompt_ids for request in requests})),
        max(response_tokens) / mean(response_tokens),
        max(server.seconds for server in simulated.values()),
    )
