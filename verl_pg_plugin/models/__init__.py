"""Models that take ``prefix_grouper``, remove padding themselves and support Ulysses.

``python -m verl_pg_plugin patch-model`` copies ``qwen3/modeling_qwen3.py`` or ``split_llama/modeling_split_llama.py``
into a checkpoint, which then loads with ``trust_remote_code=True``. ``register`` needs no copy.
"""

__all__ = ["register"]


def register() -> None:
    """Register this package's models with transformers' Auto classes in this process; repeated calls change nothing.

    ``AutoModelForCausalLM`` then builds Qwen3 and split Llama checkpoints as our causal models, and
    ``AutoModelForTokenClassification`` as our value models. For verl's worker processes, set
    ``actor_rollout_ref.model.external_lib=verl_pg_plugin.models.register_on_import``.
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
