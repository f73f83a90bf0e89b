"""The parts of transformers that this package extends, calls or asks, and how they must look; see ``contract.verl``."""

from __future__ import annotations

from verl_pg_plugin.contract.table import EXISTS, Part, parts_of

__all__ = ["TRANSFORMERS_PARTS"]

TRANSFORMERS_VERSIONS = "5.5.3 to 5.10.4"

_LLAMA = "transformers.models.llama.modeling_llama"
_QWEN3 = "transformers.models.qwen3.modeling_qwen3"
_QWEN3_FILE = "models/qwen3/modeling_qwen3.py"
_QWEN2_5_VL = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
_QWEN3_VL = "transformers.models.qwen3_vl"
_SPLIT_LLAMA_FILE = "models/split_llama/modeling_split_llama.py"


def _parts(owner: str, used_by: str, /, **signatures: str) -> tuple[Part, ...]:
    return parts_of(owner, used_by, TRANSFORMERS_VERSIONS, **signatures)


TRANSFORMERS_PARTS: tuple[Part, ...] = (
    # Attention of every architecture goes through this registry.
    *_parts("transformers", "attention/interface.py", AttentionInterface=EXISTS),
    *_parts("transformers.AttentionInterface", "attention/interface.py", register="(key, value)"),
    # What configs and model classes say about themselves; read with a default, so a missing one would go unnoticed.
    *_parts("transformers.PretrainedConfig", "mixers/attention.py", _attn_implementation=EXISTS),
    *_parts(
        "transformers.PretrainedConfig",
        "cost/flops.py engine/local_choices.py engine/shared_model.py engine/shared_prefix_engine.py",
        get_text_config="(self, decoder=None, encoder=None)",
    ),
    *_parts(
        "transformers.PreTrainedModel",
        "architectures/checks.py config/model_rules.py engine/compiled_layers.py",
        supports_gradient_checkpointing=EXISTS,
        _supports_attention_backend=EXISTS,
        _is_stateful=EXISTS,
        _no_split_modules=EXISTS,
    ),
    # Each layer is called through its own ``_gradient_checkpointing_func``, which this method sets; see its test.
    *_parts("transformers.modeling_layers", "engine/kept_layers.py", GradientCheckpointingLayer=EXISTS),
    *_parts(
        "transformers.PreTrainedModel",
        "engine/saved_attention.py",
        gradient_checkpointing_enable="(self, gradient_checkpointing_kwargs=None)",
    ),
    *_parts(
        "transformers.PreTrainedModel",
        "architectures/head_probe.py cost/flops.py",
        get_output_embeddings="(self)",
        get_input_embeddings="(self)",
        base_model=EXISTS,
        get_decoder="(self)",
    ),
    *_parts(
        "transformers",
        "architectures/checks.py architectures/randomness.py architectures/skeleton.py "
        "architectures/stock_faults.py cli/estimate/sources.py config/before_ray/prompts.py "
        "config/checkpoint_checks.py config/model_rules.py cost/flops.py cost/kept_layers.py cost/row_memory.py "
        "cpu/generation.py cpu/processor.py cpu/received_weights.py cpu/server.py cli/doctor/sharing.py "
        "engine/shared_model.py mixers/__init__.py mixers/attention.py mixers/gated_delta/mixer.py "
        "mixers/protocol.py modalities/__init__.py modalities/pictures/modality.py modalities/protocol.py "
        f"modalities/text.py engine/heads/value_model.py models/__init__.py models/packed_inputs.py {_QWEN3_FILE} "
        f"{_SPLIT_LLAMA_FILE}",
        PretrainedConfig=EXISTS,
        PreTrainedModel=EXISTS,
        MODEL_FOR_CAUSAL_LM_MAPPING=EXISTS,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING=EXISTS,
        MODEL_FOR_MASKED_LM_MAPPING=EXISTS,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING=EXISTS,
        AutoConfig=EXISTS,
        AutoProcessor=EXISTS,
        AutoModelForCausalLM=EXISTS,
        AutoModelForImageTextToText=EXISTS,
        AutoModelForTokenClassification=EXISTS,
        AutoTokenizer=EXISTS,
        DynamicCache="(config, ...)",
        GenerationMixin=EXISTS,
        LlamaConfig=EXISTS,
        Qwen3Config=EXISTS,
        Qwen3VLConfig=EXISTS,
        Qwen3VLProcessor=EXISTS,
    ),
    # Pictures: what the text model is handed behind the tower, and positions by the model's own rule.
    *_parts(
        f"{_QWEN2_5_VL}.Qwen2_5_VLTextModel",
        "modalities/pictures/sequence_parallel.py",
        forward="(position_ids, inputs_embeds, ...)",
    ),
    *_parts(
        f"{_QWEN3_VL}.modeling_qwen3_vl.Qwen3VLTextModel",
        "modalities/pictures/sequence_parallel.py",
        forward="(position_ids, inputs_embeds, visual_pos_masks, deepstack_visual_embeds, ...)",
    ),
    *_parts(
        f"{_QWEN3_VL}.modeling_qwen3_vl.Qwen3VLModel",
        "cpu/pictures.py",
        get_rope_index="(input_ids, mm_token_type_ids, image_grid_thw, attention_mask, ...)",
    ),
    *_parts(
        f"{_QWEN3_VL}.processing_qwen3_vl.Qwen3VLProcessor",
        "cpu/processor.py",
        __init__=("(self, image_processor=None, tokenizer=None, video_processor=None, chat_template=None, **kwargs)"),
    ),
    *_parts(
        "transformers.AutoProcessor",
        "cpu/processor.py",
        register="(config_class, processor_class, exist_ok=False)",
    ),
    # Files for trust_remote_code checkpoints: classes that are extended, methods that are overridden.
    *_parts("transformers.AutoConfig", "models/__init__.py", register="(model_type, config, exist_ok=False)"),
    *_parts(
        "transformers.AutoModelForCausalLM",
        "models/__init__.py",
        register="(config_class, model_class, exist_ok=False)",
    ),
    *_parts(
        "transformers.cache_utils", f"models/packed_inputs_mixin.py {_QWEN3_FILE} {_SPLIT_LLAMA_FILE}", Cache=EXISTS
    ),
    *_parts("transformers.cache_utils", _SPLIT_LLAMA_FILE, DynamicCache="(config, ...)"),
    *_parts(
        "transformers.masking_utils",
        _SPLIT_LLAMA_FILE,
        create_causal_mask="(config, inputs_embeds, attention_mask, past_key_values, position_ids, ...)",
    ),
    *_parts(
        "transformers.modeling_outputs",
        f"models/packed_inputs_mixin.py {_SPLIT_LLAMA_FILE}",
        BaseModelOutputWithPast="(last_hidden_state, past_key_values, ...)",
        CausalLMOutputWithPast="(loss, logits, past_key_values, ...)",
    ),
    *_parts(
        "transformers.modeling_outputs",
        "architectures/head_probe.py",
        MoeModelOutputWithPast="(last_hidden_state, ...)",
    ),
    *_parts("transformers.utils", "models/packed_inputs_mixin.py", can_return_tuple="(func)"),
    *_parts(
        _LLAMA,
        _SPLIT_LLAMA_FILE,
        LlamaAttention=EXISTS,
        LlamaDecoderLayer="(config, layer_idx)",
        LlamaRMSNorm="(hidden_size, eps=1e-06)",
        LlamaRotaryEmbedding="(config, device=None)",
        apply_rotary_pos_emb="(q, k, cos, sin, unsqueeze_dim=1)",
    ),
    *_parts(f"{_LLAMA}.LlamaDecoderLayer", _SPLIT_LLAMA_FILE, __init__="(self, config, layer_idx)"),
    *_parts(
        f"{_LLAMA}.LlamaAttention",
        _SPLIT_LLAMA_FILE,
        forward=(
            "(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs)"
        ),
    ),
    *_parts(
        _QWEN3,
        _QWEN3_FILE,
        Qwen3Attention=EXISTS,
        Qwen3ForCausalLM="(config)",
        Qwen3Model="(config)",
        Qwen3PreTrainedModel=EXISTS,
        apply_rotary_pos_emb="(q, k, cos, sin, unsqueeze_dim=1)",
    ),
    *_parts(
        f"{_QWEN3}.Qwen3Attention",
        _QWEN3_FILE,
        forward="(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs)",
    ),
    *_parts(
        f"{_QWEN3}.Qwen3ForCausalLM",
        f"models/packed_inputs_mixin.py {_QWEN3_FILE}",
        __init__="(self, config)",
        forward=(
            "(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, "
            "labels=None, use_cache=None, logits_to_keep=0, **kwargs)"
        ),
    ),
)
