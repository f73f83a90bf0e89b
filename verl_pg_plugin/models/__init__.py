"""Models that take ``prefix_grouper``, drop their own padding and spread tokens over a Ulysses group.

``qwen3/modeling_qwen3.py`` and ``split_llama/modeling_split_llama.py`` are files to copy into a checkpoint and load
with ``trust_remote_code=True``; ``python -m verl_pg_plugin patch-model`` does that. ``register`` needs no copy.
"""

__all__ = ["register"]


def register() -> None:
    """Make transformers' Auto classes build this package's models, in this process; calling it again changes nothing.

    From then on ``AutoModelForCausalLM`` builds Qwen3 checkpoints as ``modeling_qwen3.Qwen3ForCausalLM`` and
    ``AutoModelForTokenClassification`` as ``modeling_qwen3.Qwen3ForValue`` (one value a token). The split Llama gets
    its entries too. verl's workers are processes of their own, set
    ``actor_rollout_ref.model.external_lib=verl_pg_plugin.models.register_on_import`` for them.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3Config

    from verl_pg_plugin.models.qwen3 import modeling_qwen3 as qwen3
    from verl_pg_plugin.models.split_llama import modeling_split_llama as split_llama

    AutoConfig.register(split_llama.SplitLlamaConfig.model_type, split_llama.SplitLlamaConfig, exist_ok=True)
    for config, causal_lm, value in (
        (Qwen3Config, qwen3.Qwen3ForCausalLM, qwen3.Qwen3ForValue),
        (split_llama.SplitLlamaConfig, split_llama.SplitLlamaForCausalLM, split_llama.SplitLlamaForValue),
    ):
        AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
        AutoModelForTokenClassification.register(config, value, exist_ok=True)
