#!/usr/bin/env python
"""docs/models.md from the results of the tests of every architecture.

    python -m pytest -m "not slow" tests/architectures tests/mixers --junitxml=outputs/models.xml
    python scripts/make_models_table.py --record outputs/models.xml    # keeps them, and writes docs/models.md
    python scripts/make_models_table.py --check                        # fails if that would change it

Results are kept by the version of transformers: run the tests under the lowest and the highest that is supported, and
that of ``constraints.txt``. Those of ``tests/architectures/test_fused_kernels.py`` are slow, recorded the same way, and
stay until they run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE, RECORD = Path("docs/models.md"), Path("docs/data/models.json")
FUSED = "fused_kernels"
"""Of an outcome: whether verl's fused kernels run, as ``tests/architectures/test_fused_kernels.py`` has found it."""
RENEW = (
    "python -m pytest -m 'not slow' tests/architectures tests/mixers --junitxml=outputs/models.xml && "
    "python scripts/make_models_table.py --record outputs/models.xml"
)
HEADER = """\
# Models that packed mode runs

Made from the results of `tests/architectures` and `tests/mixers` by `scripts/make_models_table.py`: every type that
transformers has a causal language model for, {versions}.

**{exact} are exact**: through verl's FSDP2 engine, with gradient checkpointing where there is any, every log-prob,
entropy and parameter's gradient is within 1e-5 of those of each sequence alone, in float32. Gated DeltaNet hybrids are
held to other bounds, see below.

| model type | head in chunks | fused kernels | value head | compiled | kernels | needs |
|---|---|---|---|---|---|---|
"""
NOTES = """
- **head in chunks**: logits of `++prefix_grouper.logits_chunk_size` tokens at once. "no" where the model scales or caps
  its logits behind the head: those of all response tokens are held.
- **fused kernels**: verl's, which stand in for the head, as exact as the rest. "no" where the head does not come last
  or has a bias; they are refused by name there.
- **value head**: a critic of this type runs, with the same exactness.
- **compiled**: the decoder layers run under `torch.compile`, with the same exactness, and ragged batches add no graph.
  `++prefix_grouper.compile_layers=auto` compiles them on a GPU. It leaves out recurrence, images, Gemma 2, GraniteMoe,
  Ernie 4.5, OLMo 2 and StarCoder 2, whose error was up to 1.19 times that of stock rmpad. `True` compiles these
  too. Apertus is refused compiled; where "no" stands otherwise nobody has tested it.
- **kernels**: those that fit the heads of the default config (GLM 4 MoE: of released checkpoints). sdpa runs everywhere
  and is slow on a GPU. Other kernels are tested on capped scores (Gemma 2) when an engine is built. A flash-attn 2
  built without caps multiplies scores by the cap, in stock verl too, and says nothing. Layers that cap scores have run
  on a CPU only. On a GPU 33 types were run compiled, in bf16, as close to float32 as stock rmpad
  ([record](data/gpu_tests_one_h200.csv)).
- **Persimmon, Fuyu, GPT BigCode, Moshi, Cohere Compass, and Ministral 3 before transformers 5.23**: in stock rmpad on
  flash-attn their tokens see those packed in front of them. A tiny Ministral 3 on an H200 had log-probs off by 10%.
  Packed mode does not go that way; engine and doctor say so.
- **needs**: overrides under `++actor_rollout_ref.model.override_config.` (checkpointing: under
  `actor_rollout_ref.model.`) without which the type's default config is refused.
- **Mixtures of experts** are exact with transformers' `eager`, `batched_mm` and `grouped_mm` experts. The
  load-balancing loss (`output_router_logits=True`) counts shared tokens once. verl's FSDP engine never adds it to its
  loss.
- **Latent attention** (DeepSeek, GLM 4 MoE Lite, LongCat Flash, Youtu): values narrower than keys are padded for the
  kernels that want it.
- **Images**: Qwen2.5-VL, Qwen3-VL (dense and MoE) and released Qwen3.5 are tested by `tests/modalities` on tiny models,
  videos too. Bounds are 1e-5 of every sequence alone; Qwen3.5 2e-5, and 1e-4 for gradients that nearly cancel. Other
  multimodal types are refused. On an H200 Qwen3-VL in bf16 is as close to float32 as stock verl.
- **Gated DeltaNet hybrids** (Qwen3-Next, Qwen3.5) are tested by `tests/mixers`. Layers and models are within 1e-10 in
  float64. Text models in the float32 engine are within 1e-5 of float64, gradients of their decays within twice stock
  float32's own error. Multimodal ones are within 2e-5 of float32. On an H200, through fla's kernels, Qwen3.5 in bf16 is
  as close to float32 as stock padded mode. Critics of them are refused.
- **Learned attention sinks** (gpt-oss) run with every kernel: each token's output is corrected by its log-sum-exp,
  exactly, gradients included. On GPUs `tests/attention/test_gpu.py` holds the op against float32.
- **Biases that softmax ignores** (of OPT's keys) have a gradient of zero, and are held against the largest of the
  weight beside them.
- **Slow tests** of hybrids, images, latent attention, fused kernels and compiled layers, and whole runs of a mixture
  of experts, a hybrid and a model with images: [outcome and versions of each](data/slow_tests_models.csv).
"""


def read_results(path: Path) -> tuple[str, dict[str, Any]]:
    """Version of transformers and outcome by model type; ValueError where a test failed or none said anything."""
    versions, outcomes = set(), {}
    for case in ElementTree.parse(path).iter("testcase"):
        said = {entry.attrib["name"]: entry.attrib["value"] for entry in case.iter("property")}
        if case.find("failure") is not None or case.find("error") is not None:
            raise ValueError(f"{path}: {case.attrib['name']} did not pass")
        if "model" in said:
            versions.add(said["transformers"])
            outcomes.update(json.loads(said["model"]))
    if len(versions) != 1:
        raise ValueError(f"{path} holds results of {len(versions)} versions of transformers, wanted are those of one")
    return versions.pop(), outcomes


def read_record(root: Path) -> dict[str, dict[str, Any]]:
    """Outcomes by version of transformers, the lowest first, and model type."""
    path = root / RECORD
    record = json.loads(path.read_text()) if path.exists() else {}
    return dict(sorted(record.items(), key=lambda item: tuple(map(int, item[0].split(".")))))


def keep(path: Path, root: Path) -> None:
    """Renew what the record has of one version; what these tests say nothing about stays."""
    version, outcomes = read_results(path)
    record = read_record(root)
    before = record.get(version, {})
    renewed = {model_type: {**before.get(model_type, {}), **found} for model_type, found in outcomes.items()}
    record[version] = dict(sorted({**before, **renewed}.items()))
    (root / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def render(record: dict[str, dict[str, Any]]) -> str:
    """The whole document."""
    newest_first = list(reversed(record.items()))
    newest = newest_first[0][0]
    latest = {}
    for version, outcomes in reversed(newest_first):
        latest.update({model_type: (version, outcome) for model_type, outcome in outcomes.items()})
    every_kernel = {kernel for _, outcome in latest.values() for kernel in outcome["kernels"]}
    lines = {"exact": [], "refused": [], "not run": []}  # type: dict[str, list[str]]
    for model_type, (version, outcome) in sorted(latest.items()):
        name = f"{model_type}{_versions(model_type, version, newest, record)}"
        if outcome["status"] == "exact":
            columns = ("head_in_chunks", FUSED, "value_head", "compiled")
            yes = [{True: "yes", False: "no", None: "not run"}[outcome.get(column)] for column in columns]
            cells = [
                name,
                *yes,
                _kernels(outcome["kernels"], every_kernel),
                ", ".join(f"`{need}`" for need in outcome["needs"]),
            ]
        else:
            cells = [name, outcome["why"]]
        lines[outcome["status"]].append(f"| {' | '.join(cells)} |")
    versions = " and ".join(f"{len(outcomes)} in {version}" for version, outcomes in record.items())
    other = "| model type | why |\n|---|---|\n"
    notes = NOTES.replace("{newest}", newest)
    return (
        HEADER.format(versions=versions, exact=len(lines["exact"]))
        + "\n".join(lines["exact"])
        + f"\n{notes}\n**{len(lines['refused'])} are refused** by name, before anything starts:\n\n{other}"
        + "\n".join(lines["refused"])
        + f"\n\n**{len(lines['not run'])} are not run**:\n\n{other}"
        + "\n".join(lines["not run"])
        + "\n"
    )


def _versions(model_type: str, version: str, newest: str, record: dict[str, dict[str, Any]]) -> str:
    """Where a type is not the same in all versions."""
    if version != newest:
        return f" (up to {version})"
    of_type = {other: outcomes.get(model_type) for other, outcomes in record.items()}
    notes = [of_type[newest]["why"]] if of_type[newest]["status"] == "exact" and of_type[newest]["why"] else []
    for other, outcome in of_type.items():
        if outcome is None:
            notes.append(f"not in {other}")
        elif outcome["status"] != of_type[newest]["status"]:
            notes.append(f"{other}: {outcome['status']}")
    return f" ({', '.join(notes)})" if notes else ""


def _kernels(names: list[str], every: set[str]) -> str:
    return "all" if set(names) == every else ", ".join(names)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 1 if the table is stale or cannot be made."""
    parser = argparse.ArgumentParser(description="docs/models.md from the results of the tests")
    parser.add_argument("--record", type=Path, nargs="*", default=[], help="junit files of pytest, to keep first")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if docs/models.md is stale")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="checkout that holds docs")
    options = parser.parse_args(arguments)
    try:
        for path in options.record:
            keep(path, options.root)
        document, table = render(read_record(options.root)), options.root / TABLE
        if not options.check:
            table.write_text(document)
        elif not table.exists() or table.read_text() != document:
            raise ValueError(f"{TABLE} is stale; renew it: python scripts/make_models_table.py")
    except (OSError, ValueError, ElementTree.ParseError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
