"""Models that the tests compare with single sequences; ``verify=auto`` compares the others during the run.

Checks of configs and classes cover a model's attention, but not whether it mixes tokens elsewhere.
"""

from typing import Any

from verl_pg_plugin.modalities import IMAGE_MODEL_TYPES, TEXT_PARTS

_TEXT_TYPES = (
    "afmoe apertus apertus1p5_text arcee axk1 beam bitnet code_llama codegen cohere cohere2 cohere2_moe "
    "cohere_compass_text cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe "
    "flex_olmo flint fuyu gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe "
    "glm4_moe_lite gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa "
    "granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder "
    "jais2 jetmoe kolibri1 laguna llama longcat_flash mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral "
    "ministral3 mistral mixtral modernbert-decoder moshi nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 "
    "qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next sarvam_mla "
    "sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu"
)
EXACT_TYPES = frozenset({*_TEXT_TYPES.split(), *IMAGE_MODEL_TYPES, *TEXT_PARTS})
"""The exact types of docs/models.md, which a test compares, and the types with images."""

TESTED_SWITCHES = frozenset(
    ("attention_bias", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "use_qk_norm", "use_sliding_window")
)
"""Config booleans that ``tests/architectures/test_tested.py`` enables if they are off by default."""

WITHOUT_EFFECT = frozenset(
    ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache")
)
"""Config booleans that do not affect a decoder's log-probs."""

PACKAGES = ("fla.", "liger_kernel.", "peft.", "torch.", "transformers.", "veomni.", "verl.", "verl_pg_plugin.")
"""Packages whose modules and forwards the tests run."""


def untested_part(module: Any) -> str:
    """Return why no test covers a built model, or '' if one does.

    A model is untested if it has a class or forward of another package, an untested type, or a config boolean that
    differs from the type's default.
    """
    for name, part in module.named_modules():
        for defined in (type(part), type(part).forward):
            if not f"{defined.__module__}.".startswith(PACKAGES):
                where = f"{name} of {type(module).__name__}" if name else "the model"
                return f"{where} is a {type(part).__name__}, whose code in {defined.__module__} no test runs"
    if module.config.model_type not in EXACT_TYPES:
        return f"no test runs models of type {module.config.model_type}"
    text = module.config.get_text_config()
    own = type(text).__module__ == type(module.config).__module__
    if not own and text.model_type not in EXACT_TYPES:  # Mistral 3 and InternVL wrap text models of any type
        return f"no test runs {module.config.model_type} around a text model of type {text.model_type}"
    if not f"{type(text).__module__}.".startswith(PACKAGES):
        return f"no test runs the config class {type(text).__name__} of {type(text).__module__}"
    default = type(text)().to_dict()
    switched = [
        f"{name}={value}"
        for name, value in text.to_dict().items()
        if isinstance(value, bool) and name in default and value != bool(default[name])
        if name not in TESTED_SWITCHES | WITHOUT_EFFECT
    ]
    # No tiny test model has layers that read the keys of another layer.
    if shared := getattr(text, "num_kv_shared_layers", 0):
        switched.append(f"num_kv_shared_layers={shared}")
    return f"no test runs {module.config.model_type} with {', '.join(switched)}" if switched else ""
