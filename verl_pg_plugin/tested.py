"""Models that the tests compare with single sequences, and those whose layers ran compiled on a GPU.

``verify=auto`` compares the others during the run. Checks of configs and classes cover a model's attention, but not
whether it mixes tokens elsewhere.
"""

from collections.abc import Iterator
from typing import Any

from verl_pg_plugin.modalities import IMAGE_MODEL_TYPES, TEXT_PARTS

_RAN_COMPILED = """
arcee axk1 beam bitnet codegen cohere cohere2 cohere2_moe cohere_compass_text cwm deepseek_v2 deepseek_v3 dots1
ernie4_5 exaone exaone4 exaone_moe flint fuyu gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4
glm4_moe glm4_moe_lite gpt_bigcode gpt_neox gpt_oss gptj granite helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
hyperclovax internlm3 iquestcoder jais2 laguna llama mellum minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
mixtral moshi nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3
qwen3_moe qwen3_vl qwen3_vl_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
COMPILED_TYPES = frozenset(_RAN_COMPILED.split())
"""Model types whose layers ``compile_layers=auto`` compiles. On a GPU their bf16 error is that of stock verl
(docs/data/gpu_tests_one_h200.csv); on a CPU they are exact in float32 (tests/architectures/test_compiled_layers.py)."""

_RAN_UNCOMPILED = """
afmoe apertus apertus1p5_text bamba code_llama ernie4_5_moe falcon_h1 flex_olmo gemma3n_text granite_swa granitemoe
granitemoe_swa granitemoehybrid granitemoeshared jetmoe kolibri1 longcat_flash minicpm3 modernbert-decoder nemotron_h
qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
"""
EXACT_TYPES = frozenset({*COMPILED_TYPES, *_RAN_UNCOMPILED.split(), *IMAGE_MODEL_TYPES, *TEXT_PARTS})
"""The exact types of docs/models.md, which a test compares, and all types with images."""

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

    A model is untested if it has a class, forward or hook of another package, an untested type, or a config boolean
    that differs from the type's default.
    """
    for name, part in module.named_modules():
        calls = (part.forward, *part._forward_pre_hooks.values(), *part._forward_hooks.values())
        for source in (type(part).__module__, *(source for call in calls for source in _sources(call))):
            if not f"{source}.".startswith(PACKAGES):
                where = f"{name} of {type(module).__name__}" if name else "the model"
                return f"{where} is a {type(part).__name__}, whose code in {source} no test runs"
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


def _sources(call: Any) -> Iterator[str]:
    """Yield the modules that define a callable and what it wraps; ``functools.wraps`` copies only the name."""
    while call is not None:
        call = getattr(call, "func", call)  # a partial
        call = getattr(call, "__func__", call)  # a method
        code = call if hasattr(call, "__globals__") else type(call).__call__
        yield getattr(call, "__module__", None) or type(call).__module__
        yield getattr(code, "__globals__", {}).get("__name__", type(call).__module__)
        call = getattr(call, "__wrapped__", None)
