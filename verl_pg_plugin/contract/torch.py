"""The parts of torch that are private or young and that this package builds on; see ``contract.verl``."""

from __future__ import annotations

from verl_pg_plugin.contract.table import EXISTS, Part, parts_of

__all__ = ["TORCH_PARTS"]

TORCH_VERSIONS = "2.11 to 2.13"

_COMPILED_LAYERS = "engine/compiled_layers.py"


def _parts(owner: str, used_by: str, /, **signatures: str) -> tuple[Part, ...]:
    return parts_of(owner, used_by, TORCH_VERSIONS, **signatures)


TORCH_PARTS: tuple[Part, ...] = (
    # Compiled layers: which graph is taken, how many there may be, and that a failure is one.
    *_parts("torch._C._dynamo.eval_frame", _COMPILED_LAYERS, _set_lru_cache=EXISTS),
    *_parts("torch._dynamo.config", _COMPILED_LAYERS, _make_closure_patcher="(**changes)"),
    *_parts("torch._dynamo.config", _COMPILED_LAYERS, recompile_limit=EXISTS, fail_on_recompile_limit_hit=EXISTS),
    *_parts("torch._dynamo.config", _COMPILED_LAYERS, specialize_float=EXISTS),
    *_parts("torch._dynamo", "config/layer_compiler.py", config=EXISTS),
    *_parts("torch._dynamo.config", "config/layer_compiler.py", disable=EXISTS, suppress_errors=EXISTS),
    *_parts("torch._dynamo.exc", _COMPILED_LAYERS, FailOnRecompileLimitHit=EXISTS, TorchDynamoException=EXISTS),
    *_parts(
        "torch._inductor.exc",
        _COMPILED_LAYERS,
        CppCompileError=EXISTS,
        InductorError=EXISTS,
        InvalidCxxCompiler=EXISTS,
        OperatorIssue=EXISTS,
    ),
    *_parts(
        "torch._functorch.config",
        _COMPILED_LAYERS,
        _make_closure_patcher="(**changes)",
        guess_tangent_strides_as_outputs=EXISTS,
        ban_recompute_used_far_apart=EXISTS,
        ban_recompute_long_fusible_chains=EXISTS,
        ban_recompute_materialized_backward=EXISTS,
    ),
    # What an exception in a backward leaves behind, before FSDPModule.reset_iter_state.
    *_parts(
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
        "upstream/engines.py",
        _root_post_backward_final_callback="(self)",
    ),
    *_parts("torch.utils._pytree", "engine/kept_layers.py", tree_leaves="(tree, is_leaf=None)"),
    *_parts("torch.UntypedStorage", "engine/held_bytes.py", _cdata=EXISTS),
    *_parts("torch.nn.modules.dropout", "engine/requirements.py", _DropoutNd=EXISTS),
    # Public, and still on the move.
    *_parts(
        "torch.nn.attention.varlen",
        "attention/kernels/torch_varlen.py",
        varlen_attn="(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, ...)",
    ),
    *_parts(
        "torch.utils.checkpoint",
        "engine/saved_attention.py",
        create_selective_checkpoint_contexts="(policy_fn_or_list, ...)",
    ),
)
