"""Random models and the engines that ``bench_actor.py`` compares."""

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers

# Imported before engines are built: it stores import errors, whose tracebacks would keep an engine's weights alive.
import verl.checkpoint_engine  # noqa: F401
from omegaconf import OmegaConf
from verl.trainer.config import CheckpointConfig
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, VeOmniOptimizerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from benchmarks.common import free_memory
from benchmarks.shapes import SHAPES, config_of, remember
from verl_pg_plugin.config import PrefixGrouperEngineConfig, PrefixGrouperOptions, PrefixGrouperVeOmniEngineConfig
from verl_pg_plugin.config.keys import VEOMNI
from verl_pg_plugin.engine.compiled_layers import compile_layers
from verl_pg_plugin.skeleton import auto_class


@dataclass(frozen=True)
class EnginePath:
    """One of verl's four modes; ours take options of the section ``prefix_grouper``: ``packed:activations=inputs``.

    ``packed/fsdp`` or ``packed/veomni`` uses that strategy instead of fsdp2; VeOmni needs two processes and computes
    in bf16. ``@12288`` at the end is the path's token budget. ``rmpad:offload,fused,compiled`` is stock verl with
    activation offload, fused kernels or compiled layers.
    """

    mode: str
    options: str = ""
    budget: int | None = None
    strategy: str = "fsdp2"

    MODES = ("padded", "rmpad", "prefix_grouper", "packed")
    FLAGS = ("offload", "fused", "compiled")

    @classmethod
    def parse(cls, text: str) -> "EnginePath":
        name, _, budget = text.partition("@")
        name, _, options = name.partition(":")
        mode, _, strategy = name.partition("/")
        path = cls(mode, options, int(budget) if budget else None, strategy or "fsdp2")
        unknown = path.stock and options and not set(options.split(",")) <= set(cls.FLAGS)
        if mode not in cls.MODES or path.strategy not in ("fsdp", "fsdp2", VEOMNI) or unknown:
            raise argparse.ArgumentTypeError(
                f"{text}: choose {', '.join(cls.MODES)}, optionally with /fsdp or /{VEOMNI}; ours take :KEY=VALUE,..., "
                f"stock verl's :{',:'.join(cls.FLAGS)}"
            )
        return path

    def __str__(self) -> str:
        strategy = "" if self.strategy == "fsdp2" else f"/{self.strategy}"
        options = f":{self.options}" if self.options else ""
        return f"{self.mode}{strategy}{options}" + (f"@{self.budget}" if self.budget else "")

    @property
    def stock(self) -> bool:
        return self.mode in ("padded", "rmpad")

    @property
    def unpadded(self) -> bool:
        return self.mode in ("rmpad", "packed")

    @property
    def on_veomni(self) -> bool:
        return self.strategy == VEOMNI

    def has(self, flag: str) -> bool:
        return self.stock and flag in self.options.split(",")

    @property
    def sharing(self) -> PrefixGrouperOptions:
        if self.stock:
            return PrefixGrouperOptions()
        return PrefixGrouperOptions(**OmegaConf.from_dotlist(self.options.split(",") if self.options else []))


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that the functions below read from ``args``."""
    parser.add_argument("--model", default="tiny", help=f"{', '.join(SHAPES)}, or a folder with a config.json")
    parser.add_argument("--layers", type=int, help="use this many layers of the model")
    default_paths = [EnginePath("rmpad"), EnginePath("packed")]
    parser.add_argument("--paths", nargs="+", type=EnginePath.parse, default=default_paths, help=EnginePath.__doc__)
    default_attention = "flash_attention_2" if torch.cuda.is_available() else "sdpa"
    parser.add_argument("--attn-implementation", default=default_attention, help="stock verl's, transformers' name")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--lora-rank", type=int, default=0, help="train an adapter of that rank on all linear layers")


def join_process_group() -> None:
    """Join torchrun's process group, or make one of this process, on a free port: several may run on a machine."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    initialize_global_process_group_ray()


def shared_model(args: argparse.Namespace, folder: str) -> str:
    """Let rank 0 write random weights; return their folder."""
    names = [folder]
    dist.broadcast_object_list(names, src=0)
    if dist.get_rank() == 0:
        if args.model in SHAPES:
            config = config_of(args.model, max_position_embeddings=1 << 17)
        else:
            config = transformers.AutoConfig.from_pretrained(args.model)
        if args.layers:
            text = config.get_text_config()
            text.num_hidden_layers = args.layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[: args.layers]
        torch.manual_seed(0)
        with torch.device(get_device_name()):
            dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
            model = auto_class(config).from_config(config, dtype=dtype)
        remember(model).save_pretrained(names[0])
        del model
        free_memory()
    dist.barrier()
    return names[0]


class _CompiledStock(FSDPEngineWithLMHead):
    def _build_module(self) -> Any:
        module = super()._build_module()
        compile_layers(module)
        return module


def _fsdp_config(args: argparse.Namespace, path: EnginePath) -> PrefixGrouperEngineConfig:
    return PrefixGrouperEngineConfig(
        strategy=path.strategy,
        ulysses_sequence_parallel_size=args.ulysses,
        use_prefix_grouper=not path.stock,
        prefix_grouper=path.sharing,
        model_dtype=args.dtype,
        mixed_precision={"param_dtype": args.dtype, "reduce_dtype": args.dtype, "buffer_dtype": "fp32"},
        use_torch_compile=get_device_name() == "cuda",
        use_dynamic_bsz=path.unpadded,
        use_no_sync_for_gradient_accumulation=False,  # as verl's trainers have it
    )


def _veomni_config(args: argparse.Namespace, path: EnginePath) -> PrefixGrouperVeOmniEngineConfig:
    """Return verl's defaults for VeOmni, with the kernel for experts that needs Triton alone."""
    on_gpu = get_device_name() == "cuda"
    return PrefixGrouperVeOmniEngineConfig(
        ulysses_parallel_size=args.ulysses,
        use_prefix_grouper=not path.stock,
        prefix_grouper=path.sharing,
        mixed_precision=True,
        attn_implementation=args.attn_implementation,
        moe_implementation="fused_triton" if on_gpu else "eager",
        use_torch_compile=on_gpu,
    )


def build_engine(model_path: str, args: argparse.Namespace, path: EnginePath) -> Any:
    """Build verl's engine for stock paths, else ours, which stores its ``last_plan``, with the same options."""
    stock = _CompiledStock if path.has("compiled") else FSDPEngineWithLMHead
    registered = EngineRegistry.get_engine_cls("language_model", path.strategy)
    engine_cls = stock if path.stock and not path.on_veomni else registered
    optimizer_cls, optimizer = FSDPOptimizerConfig, args.optimizer
    if path.on_veomni:
        optimizer_cls, optimizer = VeOmniOptimizerConfig, args.optimizer.lower()
    engine = engine_cls(
        model_config=HFModelConfig(
            path=model_path,
            load_tokenizer=False,
            use_remove_padding=path.unpadded,
            enable_gradient_checkpointing=True,
            enable_activation_offload=path.has("offload"),
            use_fused_kernels=path.has("fused"),
            fused_kernel_options={"impl_backend": "torch"},
            override_config={"attn_implementation": args.attn_implementation},
            lora_rank=args.lora_rank,
        ),
        engine_config=(_veomni_config if path.on_veomni else _fsdp_config)(args, path),
        optimizer_config=optimizer_cls(lr=1e-6, optimizer=optimizer, total_training_steps=100),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    if not path.stock:
        plan = engine.plan

        def store(*args: Any) -> Any:
            engine.last_plan = plan(*args)
            return engine.last_plan

        engine.plan, engine.last_plan = store, None
    return engine
