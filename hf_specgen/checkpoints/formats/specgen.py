"""Our own layout: what ``save_pretrained`` writes. EAGLE-3 heads in it are read by SGLang and vLLM as they are."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from hf_specgen.checkpoints.config import LAYER_TYPES, METHODS, DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import norm_line, served_flags
from hf_specgen.checkpoints.formats.rope import rope_of
from hf_specgen.checkpoints.formats.shapes import state_shapes
from hf_specgen.checkpoints.formats.shared import (
    floats_only,
    head_lines,
    layer_settings,
    match,
    store,
    vocabulary_line,
    window_of,
)
from hf_specgen.checkpoints.formats.vllm_serves import dropped_by_vllm, warn_of_vllm
from hf_specgen.checkpoints.formats.vocabulary import check_map
from hf_specgen.errors import IncompatibleDrafter

VERSION = 1
KEY = "specgen"
# Under the same name at the top of config.json, where engines read them.
SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "vocab_size",
)
# The layer type is ``model_type`` there, the rope and the window stand there in the engines' own ways.
TOLD_OTHERWISE = ("layer_type", "rope_parameters", "sliding_window", "layer_types")
ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "LlamaForCausalLMEagle", "medusa": "MedusaDrafter"}
QWEN3 = "Eagle3Qwen3ForCausalLM"  # vLLM's name of EAGLE-3 with norms of queries and keys; SGLang has none
OURS = "SpecGenDrafter"  # what others would read wrongly must not be taken for another drafter


class SpecGenLayout(Layout):
    """Read and write our own layout: a config with the key ``specgen``, tensors under our module names."""

    name = "specgen"
    order = 0

    def matches(self, source: Source) -> bool:
        """Tell by the key ``specgen``."""
        return isinstance(source.config.get(KEY), Mapping)

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Take config and names as they were written. Raises: ``IncompatibleDrafter`` as every layout does."""
        config = read_config(source)
        names = match(source, {name: name for name in source.shapes}, config)
        warnings = []
        if options.aux_layer_convention and config.method == "eagle3":
            warnings.append(
                f"aux_layer_convention={options.aux_layer_convention!r} has no effect: this checkpoint states the "
                f"target's layers as boundaries ({config.aux_layer_boundaries})."
            )
        return Plan(config, names, _notes(source, config), tuple(warnings), lambda found: finish(found, source.name))

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write config and weights. Raises: ``IncompatibleDrafter`` for tensors that are not the drafter's."""
        config = checkpoint.config
        tensors = checkpoint.tensors
        wanted = state_shapes(config)
        wrong = sorted(
            name for name in wanted.keys() | tensors.keys() if wanted.get(name) != shape_of(tensors.get(name))
        )
        if wrong:
            raise IncompatibleDrafter(
                f"the tensors {', '.join(wrong[:8])} are missing, unknown or of another shape than the config says "
                f"({config.method}): a drafter's own state_dict is required."
            )
        if config.method == "eagle3":
            warn_of_vllm(config)
        store(folder, config_file(checkpoint), tensors)


def finish(found: Checkpoint, source: str) -> Checkpoint:
    """Check dtypes and the vocabulary map. Raises: ``IncompatibleDrafter`` as every layout does."""
    floats_only(source, found.tensors)
    return check_map(found, source)


def shape_of(tensor: Any) -> tuple[int, ...] | None:
    """Return a tensor's shape, or None for no tensor."""
    return None if tensor is None else tuple(tensor.shape)


def config_file(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return ``config.json``: what engines read at the top, what is ours under ``specgen``."""
    config = checkpoint.config
    fields = config.to_dict()
    own = {name: fields[name] for name in _own_fields()}
    settings = layer_settings(checkpoint)
    if config.method == "medusa":
        settings["model_type"] = DrafterConfig.model_type  # nobody may take it for a Llama
    flags = served_flags(config) if config.method == "eagle3" else {}
    if config.method == "eagle":  # SafeAILab's loader takes an absent ``bias`` for true
        flags = {"bias": config.fc_bias, "qkv_bias": config.attention_bias}
    return {
        **settings,
        **flags,
        "architectures": [architecture_of(config)],
        KEY: {**own, "version": VERSION, "layer_type": config.layer_type},
    }


def architecture_of(config: DrafterConfig) -> str:
    """Return what others may take a drafter for: a name that nobody knows where they would serve another one."""
    if config.reduces_vocabulary and not config.own_head:  # some rows of the target's head: nobody reads that
        return OURS
    if config.method == "eagle3" and dropped_by_vllm(config):
        return OURS
    if config.method == "eagle3" and config.layer_type == "qwen3":
        return QWEN3
    return ARCHITECTURES[config.method]


def read_config(source: Source) -> DrafterConfig:
    """Return the config of a checkpoint of ours. Raises: ``IncompatibleDrafter`` for a newer version."""
    own = dict(source.config[KEY])
    version = own.pop("version", None)
    layer_type = own.pop("layer_type", "llama")
    if not isinstance(version, int) or version > VERSION:
        raise IncompatibleDrafter(
            f"{source.name} is written in version {version!r} of our layout and version {VERSION} is known here: "
            "update hf_specgen."
        )
    unknown = sorted(set(own) - set(_own_fields()))
    if unknown or layer_type not in LAYER_TYPES:
        raise IncompatibleDrafter(
            f"{source.name} has settings that are not understood: {', '.join(unknown) or layer_type}. Update "
            "hf_specgen, or remove them from config.json if they do not matter."
        )
    settings = source.config
    if own.get("method") not in METHODS:
        raise IncompatibleDrafter(
            f"{source.name} is a drafter of method {own.get('method')!r}: one of {', '.join(METHODS)} is required. "
            "A newer hf_specgen may know it."
        )
    shared = {name: settings[name] for name in SHARED if name in settings}
    config = DrafterConfig(**shared, **own, layer_type=layer_type, **window_of(source, settings).value)
    if config.method != "medusa":  # has no layers
        config.rope_parameters = rope_of(source, settings, config.head_dim, config.num_hidden_layers).value
    return config


def _own_fields() -> list[str]:
    names = list(signature(DrafterConfig.__init__).parameters)
    return [name for name in names if name not in ("self", "kwargs", *SHARED, *TOLD_OTHERWISE)]


def _notes(source: Source, config: DrafterConfig) -> tuple[str, ...]:
    first = f"layout: specgen (ours), method {config.method}"
    if config.method == "medusa":
        blocks = f"{config.num_heads} heads of {config.num_head_layers} residual blocks"
        return (first, blocks, vocabulary_line(config), *head_lines(config))
    if config.method == "eagle3":
        stated = config.aux_layer_boundaries or "(2, n // 2, n - 3) of the target's n, once it is known"
        features = (f"target layers: boundaries {stated}, as the config states", norm_line(config))
    else:
        features = ("target layers: what the head reads, after the last norm", f"fc: bias {config.fc_bias}")
    rope = rope_of(source, source.config, config.head_dim, config.num_hidden_layers)
    window = window_of(source, source.config)
    return (first, *features, vocabulary_line(config), rope.note, window.note, *head_lines(config))


LAYOUT = SpecGenLayout()
