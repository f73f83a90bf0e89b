"""Compute every shared prefix once, with the log-probs and gradients of each sequence alone.

    python examples/shared_prefix_in_one_file.py

This is the core of verl_pg_plugin on the CPU with torch alone; docs/concepts.md follows it from top to bottom.
A test compares the package with it: ``layout/`` builds the same arrays, and ``attention/`` computes the same output.

Shape suffixes, as in ``q_THD``:
    T packed tokens, N tokens with the head    L tokens of one sequence alone, R of its response    C hidden size
    Q queries, K keys of one attention call     H query heads, G key/value heads of D numbers        V vocabulary
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- The prefix tree -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """A prompt with one response. Only response tokens have a loss."""

    prompt: Sequence[int]
    response: Sequence[int]
    advantage: float = 1.0

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.response)


@dataclass(frozen=True)
class PackedTokens:
    """The nodes of a prefix tree in depth-first order: parents come before their children."""

    token_T: Tensor  # the token that a node reads
    label_T: Tensor  # the token that it predicts
    position_T: Tensor  # its depth, which is its position in every sequence that contains it
    parent_T: Tensor  # the node before it in these sequences; -1 at their beginning
    paths: list[Tensor]  # (L,) nodes of each sample, in the order of the samples


def pack(samples: Sequence[Sample]) -> PackedTokens:
    """Sequences share a node if they agree up to the label: at position t, on tokens 0 to t + 1.

    Sorted by their tokens, sequences that share a prefix are neighbours, so nodes are created in depth-first order.
    """
    node_of: dict[tuple[int, int, int], int] = {}
    paths: dict[int, Tensor] = {}
    for s in sorted(range(len(samples)), key=lambda s: samples[s].tokens):
        node, path = -1, []
        for token, label in pairwise(samples[s].tokens):
            node = node_of.setdefault((node, token, label), len(node_of))
            path.append(node)
        paths[s] = torch.tensor(path, dtype=torch.long)
    parent_T, token_T, label_T = torch.tensor(list(node_of)).unbind(1)
    position_T = torch.zeros_like(token_T)
    for path_L in paths.values():
        position_T[path_L] = torch.arange(len(path_L))
    return PackedTokens(token_T, label_T, position_T, parent_T, [paths[s] for s in range(len(samples))])


# --- Attention over the tree -----------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(T, H, D) of queries (T, H, D), and keys and values (T, G, D)."""


def ancestor_mask(parent_T: Tensor) -> Tensor:
    """(T, T), True where a query may read a key: a node reads itself and what its parent reads."""
    mask_TT = torch.eye(len(parent_T), dtype=torch.bool)
    for node, parent in enumerate(parent_T.tolist()):
        if parent >= 0:
            mask_TT[node] |= mask_TT[parent]
    return mask_TT


def masked_attention(q_QHD: Tensor, k_KGD: Tensor, v_KGD: Tensor, mask_QK: Tensor) -> Tensor:
    """(Q, H, D): attention of every query over the keys that the mask leaves."""
    q_HQD, k_GKD, v_GKD = (x.transpose(0, 1)[None] for x in (q_QHD, k_KGD, v_KGD))
    return F.scaled_dot_product_attention(q_HQD, k_GKD, v_GKD, attn_mask=mask_QK, enable_gqa=True)[0].transpose(0, 1)


@dataclass(frozen=True)
class Segment:
    """Packed tokens ``start:stop`` that belong to the same branch, and every key that one of them reads."""

    start: int
    stop: int
    keys: Tensor  # (K,) ancestors from the root down, then the segment's own tokens


def cut_into_segments(parent_T: Tensor, mask_TT: Tensor) -> list[Segment]:
    """A segment begins at a root and at every child of a node that has several."""
    num_children = torch.bincount(parent_T + 1)  # entry 0 counts the roots
    begins_T = (parent_T < 0) | (num_children[parent_T + 1] > 1)
    bounds = [*begins_T.nonzero().squeeze(1).tolist(), len(parent_T)]
    # The last token of a segment reads all of its keys.
    return [Segment(start, stop, mask_TT[stop - 1].nonzero().squeeze(1)) for start, stop in pairwise(bounds)]


def varlen_attention(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, segments: Sequence[Segment]) -> Tensor:
    """The same as ``masked_attention``: with its keys gathered, a segment is an ordinary causal problem.

    A varlen kernel computes all of them in one call; its causal mask is aligned to the last key.
    """
    outs = []
    for segment in segments:
        q_QHD, k_KGD, v_KGD = q_THD[segment.start : segment.stop], k_TGD[segment.keys], v_TGD[segment.keys]
        causal_QK = torch.ones(len(q_QHD), len(k_KGD), dtype=torch.bool).tril(len(k_KGD) - len(q_QHD))
        outs.append(masked_attention(q_QHD, k_KGD, v_KGD, causal_QK))
    return torch.cat(outs)


# --- A toy decoder: only attention mixes tokens ----------------------------------------------------------------------


def rotate(x_THD: Tensor, position_T: Tensor) -> Tensor:
    """Rotary embedding. Positions are those of the sequences, not places in the packed order."""
    half = x_THD.shape[-1] // 2
    angle = position_T[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=x_THD.dtype) / half)
    a, b, cos, sin = *x_THD.chunk(2, dim=-1), angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Layer(nn.Module):
    """Grouped-query attention and an MLP, each after a norm."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = hidden_size // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)
        sizes = [heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, size, bias=False) for size in sizes)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, 2 * hidden_size, bias=False)
        self.down_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)

    def forward(self, x_TC: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        normed_TC, by_head = self.attention_norm(x_TC), (-1, self.head_dim)
        q_THD = rotate(self.q_proj(normed_TC).unflatten(1, by_head), position_T)
        k_TGD = rotate(self.k_proj(normed_TC).unflatten(1, by_head), position_T)
        v_TGD = self.v_proj(normed_TC).unflatten(1, by_head)
        x_TC = x_TC + self.o_proj(attend(q_THD, k_TGD, v_TGD).flatten(1))
        return x_TC + self.down_proj(F.silu(self.up_proj(self.mlp_norm(x_TC))))


class Decoder(nn.Module):
    """Embedding, layers and head. It knows nothing of sharing: only ``attend`` does."""

    def __init__(self, vocab_size: int, hidden_size: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(Layer(hidden_size, heads=4, kv_heads=2) for _ in range(num_layers))
        self.norm = nn.RMSNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, token_T: Tensor, position_T: Tensor, attend: Attend) -> Tensor:
        x_TC = self.embedding(token_T)
        for layer in self.layers:
            x_TC = layer(x_TC, position_T, attend)
        return self.norm(x_TC)

    def log_probs(self, hidden_NC: Tensor, label_N: Tensor) -> Tensor:
        """(N,) log-probs of the labels."""
        return self.head(hidden_NC).log_softmax(dim=-1).gather(1, label_N[:, None]).squeeze(1)


# --- Log-probs and gradients, packed and alone -----------------------------------------------------------------------


def packed_log_probs(model: Decoder, samples: Sequence[Sample], packed: PackedTokens, attend: Attend) -> list[Tensor]:
    """(R,) log-probs of each response, from one forward of all packed tokens."""
    hidden_TC = model(packed.token_T, packed.position_T, attend)
    # The token before a response token predicts it. The head runs once for each node that some response needs.
    predictors = [path[len(sample.prompt) - 1 :] for sample, path in zip(samples, packed.paths, strict=True)]
    head_N = torch.cat(predictors).unique()
    log_prob_N = model.log_probs(hidden_TC[head_N], packed.label_T[head_N])
    return [log_prob_N[torch.searchsorted(head_N, nodes_R)] for nodes_R in predictors]


def log_probs_alone(model: Decoder, samples: Sequence[Sample]) -> list[Tensor]:
    """(R,) log-probs of each response, from a forward of each sequence alone: the reference."""
    log_probs = []
    for sample in samples:
        token_L, label_L = torch.tensor((sample.tokens[:-1], sample.tokens[1:]), dtype=torch.long)
        causal_LL = torch.ones(len(token_L), len(token_L), dtype=torch.bool).tril()
        hidden_LC = model(token_L, torch.arange(len(token_L)), partial(masked_attention, mask_QK=causal_LL))
        response = slice(len(sample.prompt) - 1, None)
        log_probs.append(model.log_probs(hidden_LC[response], label_L[response]))
    return log_probs


def gradients(model: Decoder, samples: Sequence[Sample], log_probs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Policy gradient by parameter. A shared node gets the sum of what its sequences send back; autograd adds it up."""
    loss = -sum(sample.advantage * log_prob_R.sum() for sample, log_prob_R in zip(samples, log_probs, strict=True))
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


# --- What it prints --------------------------------------------------------------------------------------------------

RESPONSES = {"sum:1+2=": ["3.", "12"], "sum:4+4=": ["8.", "9"], "sum:4+4=8.ok?": ["y.", "n"]}
"""By prompt: two questions after one system prompt, and a turn that continues an answer. A token is a character."""


def draw(packed: PackedTokens, mask_TT: Tensor, segments: Sequence[Segment]) -> None:
    """Print the tree with a line for each segment, then for every packed token who shares it and what it attends to."""
    letters = "".join(map(chr, packed.token_T))
    alone = sum(len(path) + 1 for path in packed.paths)  # a sequence alone also runs its last token
    print(f"{len(letters)} packed tokens instead of {alone}; segments, each at its position:")
    for segment in segments:
        print(" " * (4 + int(packed.position_T[segment.start])) + letters[segment.start : segment.stop])
    print(f"\n  reads predicts sequences attends to\n{' ' * 27}{letters}")
    for node, (letter, label) in enumerate(zip(letters, map(chr, packed.label_T), strict=True)):
        shared_by = "".join(str(s) if node in path else "." for s, path in enumerate(packed.paths))
        row = "".join("#" if read else "." for read in mask_TT[node])
        print(f"  {letter:5} {label:8} {shared_by:9} {row}")


def outcome(model: Decoder, samples: Sequence[Sample], log_probs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The log-prob of every response token and the gradient of every parameter."""
    tokens = {f"log-prob {s}.{r}": x for s, row in enumerate(log_probs) for r, x in enumerate(row)}
    return tokens | {f"gradient of {name}": x for name, x in gradients(model, samples, log_probs).items()}


def main() -> None:
    torch.manual_seed(0)
    model = Decoder(vocab_size=128).double()
    texts = [(prompt, response) for prompt, responses in RESPONSES.items() for response in responses]
    samples = [Sample(p.encode(), r.encode(), advantage=1.0 - 0.3 * s) for s, (p, r) in enumerate(texts)]
    packed = pack(samples)
    mask_TT = ancestor_mask(packed.parent_T)
    segments = cut_into_segments(packed.parent_T, mask_TT)
    draw(packed, mask_TT, segments)
    ways = partial(masked_attention, mask_QK=mask_TT), partial(varlen_attention, segments=segments)
    outcomes = [outcome(model, samples, packed_log_probs(model, samples, packed, attend)) for attend in ways]
    print(f"\n{'largest difference from each sequence alone':46}   masked   varlen")
    for name, expected in outcome(model, samples, log_probs_alone(model, samples)).items():
        print(f"{name:46}", *(f"{(one[name] - expected).abs().max():8.1e}" for one in outcomes))


if __name__ == "__main__":
    main()
