"""EAGLE-3 as the speculators library writes it and vLLM serves it: settings of the layers nested, boundaries as ids."""

from __future__ import annotations

import warnings as python_warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import DEFAULT_TAKEN, IDS, OURS, Reading, numbered, plan_eagle3
from hf_specgen.checkpoints.formats.layer_ids import LayerIds
from hf_specgen.checkpoints.formats.lent import EMBEDDING
from hf_specgen.checkpoints.formats.shared import layer_settings, store
from hf_specgen.errors import IncompatibleDrafter

ALGORITHM = "eagle3"
DRAFTED = 3
# The nested config leaves out what equals its class's defaults; these are the classes' (transformers 4 and 5).
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
}


class VllmEagle3(Layout):
    """Read and write the speculators layout: layers nested in ``transformer_layer_config``, ids are boundaries."""

    name = "vllm-speculators"
    order = 10

    def matches(self, source: Source) -> bool:
        """Tell by ``speculators_model_type``."""
        return source.config.get("speculators_model_type") == ALGORITHM

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does."""
        config = source.config
        settings = nested_settings(source)
        ids = _ids(config)
        before = config.get("norm_before_residual")
        trained, told = _trained_for(config)
        reading = Reading(
            title="EAGLE-3 in the speculators layout, as vLLM reads it",
            settings=settings,
            ids=ids,
            draft_vocab_size=config.get("draft_vocab_size"),
            layer_type=settings["model_type"],
            windows=True,
            own_depth=True,
            # vLLM takes True where the key is absent, the library that wrote the file False: vLLM is what serves it
            norm_before_residual=True if before is None else bool(before),
            norm_output=bool(config.get("norm_output")),
            claims=frozenset(name for name in ("norm_before_fc", "fc_norm") if config.get(name)),
            target=trained,
            notes=told,
            warnings=_doubts(options, before),
        )
        return plan_eagle3(source, options, reading)

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write what vLLM reads. Raises: ``IncompatibleDrafter`` without a target's name or a head of its own.

        How to draft (tree, adaptive length) and the target's fingerprint are not part of it.
        """
        _refuse_what_vllm_lacks(checkpoint.config)
        shipped = {name: checkpoint.lent[name] for name in self.borrowed(checkpoint.config) if name in checkpoint.lent}
        if len(shipped) < len(self.borrowed(checkpoint.config)):
            python_warnings.warn(
                "the drafter reads the target's embedding and the file has none: vLLM takes the target's, the "
                "speculators library begins with noise. To write it too: hf-specgen convert --target TARGET.",
                stacklevel=2,
            )
        store(folder, config_file(checkpoint), {**numbered(checkpoint.tensors), **shipped})

    def borrowed(self, config: DrafterConfig) -> tuple[str, ...]:
        """Return the embedding of the target where the drafter has none: the speculators library keeps noise there."""
        return () if config.own_embedding else (EMBEDDING,)


def nested_settings(source: Source) -> dict[str, Any]:
    """Return the layers' settings, defaults filled in. Raises: ``IncompatibleDrafter`` for layers of other models."""
    given = dict(source.config.get("transformer_layer_config") or {})
    kind = given.get("model_type", "llama")
    if kind not in DEFAULTS:
        raise IncompatibleDrafter(
            f"{source.name} has layers of the kind {kind!r} (transformer_layer_config): {' or '.join(DEFAULTS)} is "
            "required."
        )
    filled = {**DEFAULTS[kind], **{name: value for name, value in given.items() if value is not None}}
    wide = source.config.get("target_hidden_size")
    return {"num_hidden_layers": 1, **filled, "model_type": kind, **({"target_hidden_size": wide} if wide else {})}


def config_file(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return ``config.json`` of the speculators layout."""
    config = checkpoint.config
    settings = layer_settings(checkpoint)
    taken = list(config.aux_layer_boundaries)
    if len(taken) not in (0, DEFAULT_TAKEN):  # vLLM counts the ids of other layouts and of this one reads the number
        settings["num_aux_hidden_states"] = len(taken)
    dtype = settings.pop("dtype")
    settings.pop("torch_dtype")
    version = settings.pop("transformers_version")
    architectures = config.target.get("architectures") or []
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_tokens or DRAFTED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": ALGORITHM,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        **({"norm_output": True} if config.norm_output else {}),
        IDS: taken or None,
        **({OURS: taken} if taken[:1] == [1] else {}),  # or they would look like copied layer outputs
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformers_version": version,
        "transformer_layer_config": {
            **settings,
            "architectures": ["LlamaForCausalLM" if config.layer_type == "llama" else "Qwen3ForCausalLM"],
        },
        "speculators_config": {
            "algorithm": ALGORITHM,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.target["name"], "architectures": list(architectures)},
        },
    }


def _ids(config: Mapping[str, Any]) -> LayerIds:
    """Return the layer ids: boundaries, which our own key states where they might be taken for copies."""
    if config.get(OURS):
        return LayerIds(tuple(config[OURS]), stated=True)
    ids = config.get(IDS)
    return LayerIds(tuple(ids) if ids else None, certain=True, served=True)


def _trained_for(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    told = config.get("speculators_config") or {}
    target = told.get("verifier") or {}
    methods = told.get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens")
    kept = {"name": target.get("name_or_path"), "architectures": target.get("architectures")}
    lines = (f"drafted tokens: its authors draft {drafted} a round (num_tokens decides here)",) if drafted else ()
    return {name: value for name, value in kept.items() if value}, lines


def _doubts(options: ReadOptions, before: bool | None) -> tuple[str, ...]:
    if before is not None or "norm_before_residual" in options.given:
        return ()
    return (
        "norm_before_residual is not in the config: read as true, as vLLM does; the speculators library itself reads "
        "false. Pass norm_before_residual=False if few drafts are accepted.",
    )


def _refuse_what_vllm_lacks(config: DrafterConfig) -> None:
    if config.method != "eagle3":
        raise IncompatibleDrafter(f"layout 'vllm-speculators' holds EAGLE-3 heads and this is {config.method!r}.")
    dropped = config.dropped_by_vllm
    if dropped:
        raise IncompatibleDrafter(
            f"vLLM reads no {', no '.join(dropped)} and would serve another drafter: keep the specgen layout."
        )
    if not config.own_head:
        raise IncompatibleDrafter(
            "vLLM needs lm_head.weight in this layout and the drafter uses the target's head. Convert to sglang-eagle3."
        )
    if not config.target.get("name"):
        raise IncompatibleDrafter(
            "vLLM needs the target's name in this layout (speculators_config.verifier.name_or_path) and the drafter "
            "knows none: set drafter.config.target['name'], or load it with target=model."
        )


LAYOUT = VllmEagle3()
