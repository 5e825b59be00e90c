"""Our own layout: what ``save_pretrained`` writes. EAGLE-3 heads in it are read by SGLang and vLLM as they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_specgen.checkpoints.config import LAYER_TYPES, DrafterConfig, FeatureConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.rope import rope_of
from hf_specgen.checkpoints.formats.shared import (
    common_settings,
    floats_only,
    head_lines,
    layer_settings,
    match,
    store,
    vocabulary_line,
    window_of,
)
from hf_specgen.checkpoints.formats.vllm_serves import warn_of_vllm
from hf_specgen.checkpoints.formats.vocabulary import check_map
from hf_specgen.checkpoints.methods import config_class, field_names, state_shapes
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
        if options.aux_layer_convention and config.aux_layer_boundaries:
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
        if config.dropped_by_vllm and config.served_as != config.architecture:
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
    own = {name: fields[name] for name in config.field_names() if name not in (*SHARED, *TOLD_OTHERWISE)}
    own |= {"method": config.method, "version": VERSION}
    if isinstance(config, FeatureConfig):
        settings = layer_settings(checkpoint)
        own["layer_type"] = config.layer_type
    else:  # nobody may take it for a model with layers
        settings = {**common_settings(checkpoint), "model_type": DrafterConfig.model_type}
    return {**settings, **config.served_flags, "architectures": [config.served_as], KEY: own}


def read_config(source: Source) -> DrafterConfig:
    """Return the config of a checkpoint of ours. Raises: ``IncompatibleDrafter`` for a newer version."""
    own = dict(source.config[KEY])
    version = own.pop("version", None)
    if not isinstance(version, int) or version > VERSION:
        raise IncompatibleDrafter(
            f"{source.name} is written in version {version!r} of our layout and version {VERSION} is known here: "
            "update hf_specgen."
        )
    layer_type = own.pop("layer_type", "llama")
    method = own.pop("method", None)
    unknown = sorted(set(own) - set(field_names()))
    if unknown or layer_type not in LAYER_TYPES:
        raise IncompatibleDrafter(
            f"{source.name} has settings that are not understood: {', '.join(unknown) or layer_type}. Update "
            "hf_specgen, or remove them from config.json if they do not matter."
        )
    try:
        kind = config_class(str(method))
    except IncompatibleDrafter as error:
        raise IncompatibleDrafter(f"{source.name} is a drafter of method {method}: {error}") from error
    settings = source.config
    given = {name: settings[name] for name in SHARED if name in settings} | own
    known = kind.field_names()
    # files of earlier versions hold the fields of every method
    fields = {name: value for name, value in given.items() if name in known}
    if not issubclass(kind, FeatureConfig):
        return kind(**fields)
    config: FeatureConfig = kind(**fields, layer_type=layer_type, **window_of(source, settings).value)
    config.rope_parameters = rope_of(source, settings, config.head_dim, config.num_hidden_layers).value
    return config


def _notes(source: Source, config: DrafterConfig) -> tuple[str, ...]:
    first = f"layout: specgen (ours), method {config.method}"
    lines = (first, *config.notes, vocabulary_line(config))
    if isinstance(config, FeatureConfig):
        rope = rope_of(source, source.config, config.head_dim, config.num_hidden_layers)
        window = window_of(source, source.config)
        lines = (*lines, rope.note, window.note)
    return (*lines, *head_lines(config))


LAYOUT = SpecGenLayout()
