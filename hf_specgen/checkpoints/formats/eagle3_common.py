"""How every EAGLE-3 layout becomes one drafter: layers, features, norms, vocabulary map, embedding and head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.layer_ids import BOUNDARY, LAYER_OUTPUT, LayerIds, resolve
from hf_specgen.checkpoints.formats.shared import (
    PROBE,
    floats_only,
    head_lines,
    layer_fields,
    match,
    output_biases,
    overruled,
    refuse_unreadable,
    rope_and_window,
    short_names,
    vocabulary_line,
    with_output_biases,
)
from hf_specgen.checkpoints.formats.vocabulary import check_map
from hf_specgen.errors import IncompatibleDrafter

FIRST = "midlayer."
DEFAULT_TAKEN = 3  # layers of the target that are read where no ids are listed, by the published rule
OURS = "aux_layer_boundaries"
IDS = "eagle_aux_hidden_state_layer_ids"
ID_NAMES = (IDS, "aux_hidden_state_layer_ids")
# Copies of the target's tensors that training code leaves behind.
COPIES = frozenset({"verifier_lm_head.weight", "verifier_norm.weight"})


@dataclass(frozen=True)
class Reading:
    """Hold what a layout says in its own words: everything that the tensors alone do not tell.

    ``settings``: the layers' config. ``layers``: the target's number of layers, 0 if it is not told.
    """

    title: str
    settings: Mapping[str, Any]
    ids: LayerIds
    draft_vocab_size: int | None = None
    layer_type: str | None = None
    """What the config says for certain; else a norm of the queries tells Qwen3's layers from Llama's."""
    norm_before_residual: bool = False
    norm_output: bool = False
    windows: bool = False
    """Whether the producer's layers follow ``layer_types``; most attend to every token whatever it says."""
    own_depth: bool = False
    """Whether ``num_hidden_layers`` is the drafter's for certain, so that other layers mean damage."""
    claims: frozenset[str] = frozenset()
    """Which of ``norm_before_fc`` and ``fc_norm`` the config asks for; the tensors decide."""
    target: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 0
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def eagle3_names(source: Source) -> dict[str, str]:
    """Return our names of the checkpoint's tensors, mapped to the file's."""
    names = short_names(source, "model.")
    if any(name.startswith(FIRST) for name in names):
        return names
    return {_ours(name): full for name, full in names.items()}


def is_eagle3(source: Source) -> bool:
    """Tell an EAGLE-3 head by its tensors: the middle layer, its feature norm, or attention over 2H features."""
    bare = {name.removeprefix("model."): shape for name, shape in source.shapes.items()}
    wide = bare.get("layers.0.self_attn.q_proj.weight", (0, 0))
    width = source.config.get("hidden_size")
    return (
        any(name.startswith(FIRST) for name in bare)
        or "layers.0.hidden_norm.weight" in bare
        or (isinstance(width, int) and len(wide) == 2 and wide[1] == 2 * width)
    )


def first_layer_is(source: Source, prefix: str) -> bool:
    """Tell how the first layer is called: ``midlayer.`` or ``layers.0.``."""
    return any(name.removeprefix("model.").startswith(prefix) for name in source.shapes)


def nested(source: Source) -> Mapping[str, Any]:
    """Return ``eagle_config``. Raises: ``IncompatibleDrafter`` for the graphs it can ask for that are not EAGLE-3."""
    settings = source.config.get("eagle_config") or {}
    unusual = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    wrong = [f"{key}={settings[key]}" for key, usual in unusual.items() if settings.get(key) not in (None, usual)]
    if wrong:
        raise IncompatibleDrafter(
            f"{source.name} asks for {', '.join(wrong)} in eagle_config: EAGLE-3 with features of several layers, an "
            "input norm and a last norm is required."
        )
    return settings


def plain_ids(source: Source, convention: str, certain: bool = False) -> LayerIds:
    """Return the layer ids of a config that is not nested in another.

    Our own key states boundaries. The key at the top is vLLM's, boundaries; the one in ``eagle_config`` is the
    producer's. Raises: ``IncompatibleDrafter`` when both are there and cannot both be right.
    """
    config = source.config
    if config.get(OURS):
        return LayerIds(tuple(config[OURS]), stated=True)
    top = _listed(source, config)
    inner = _listed(source, config.get("eagle_config") or {})
    if top is None:
        return LayerIds(inner, convention, certain)
    if inner is None or tuple(index + 1 for index in inner) == top:
        return LayerIds(top, BOUNDARY, certain=inner is not None, served=inner is None)
    if top == inner:
        return LayerIds(top, convention, certain, served=True)
    raise IncompatibleDrafter(
        f"{source.name} lists the layer ids {list(top)} in {IDS} and {list(inner)} in eagle_config: equal ones are "
        "required, or the second one less. Correct its config.json."
    )


def _listed(source: Source, settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layer ids that settings list under either name. Raises: ``IncompatibleDrafter`` for two lists."""
    found = {name: tuple(settings[name]) for name in ID_NAMES if settings.get(name)}
    if len(set(found.values())) > 1:
        raise IncompatibleDrafter(
            f"{source.name} lists other layer ids in {' than in '.join(found)} ({found}): one list is required. "
            "Correct its config.json."
        )
    return next(iter(found.values()), None)


def plan_eagle3(source: Source, options: ReadOptions, reading: Reading) -> Plan:
    """Resolve a checkpoint of any EAGLE-3 layout. Raises: ``IncompatibleDrafter`` naming what does not fit."""
    settings = reading.settings
    warnings = [*reading.warnings, *refuse_unreadable(source, settings)]
    names = eagle3_names(source)
    shapes = {short: tuple(source.shapes[full]) for short, full in names.items()}
    layers = _target_layers(source, options, reading)
    bounds = resolve(source.name, ids_of(reading.ids, options), layers, options.aux_layer_convention)
    fields = layer_fields(source, settings, names, FIRST)
    fields["layer_type"] = reading.layer_type or fields["layer_type"]
    told = () if reading.own_depth else overruled(settings, fields)
    fields["num_hidden_layers"] = settings["num_hidden_layers"] if reading.own_depth else fields["num_hidden_layers"]
    settings = {**settings, "num_hidden_layers": fields["num_hidden_layers"]}
    rope, window = rope_and_window(source, settings, fields, options, reading.windows)
    if shapes.get("fc.weight", (0, 0))[1] == fields["hidden_size"]:
        warnings.append("fc reads as many features as the drafter is wide: readers that go by width leave it out.")
    config = DrafterConfig(
        "eagle3",
        **fields,
        **_features(source, reading, shapes, fields["hidden_size"], len(bounds.value) or DEFAULT_TAKEN),
        **_norms(source, reading, names),
        **_vocabulary(source, reading, shapes, fields["vocab_size"]),
        rope_parameters=rope.value,
        **window.value,
        aux_layer_boundaries=bounds.value,
        # a file that names no target is for the one it is loaded with: vLLM's layout must name one
        target={**({"name": options.target.name} if options.target.name else {}), **reading.target},
    )
    config.own_head = _owns_head(source, config, names)
    first = FIRST if FIRST in "".join(names.values()) else "layers.0."
    made = frozenset({"t2d", *output_biases(config)})
    probed = {PROBE + name: names[name] for name in ("d2t", "t2d") if name in names and not config.reduces_vocabulary}
    dropped = frozenset({*COPIES, *([] if config.reduces_vocabulary else ["d2t", "t2d"])})
    found = match(source, names, config, made, dropped, lambda name: name.replace(FIRST, first, 1))
    for line in (*rope.warnings, *window.warnings, *bounds.warnings):
        warnings.append(line)
    notes = (
        f"layout: {reading.title}",
        bounds.note,
        norm_line(config),
        vocabulary_line(config),
        rope.note,
        window.note,
        *head_lines(config),
        *told,
        *reading.notes,
    )
    return Plan(config, {**found, **probed}, notes, tuple(warnings), lambda got: finish_eagle3(got, source.name))


def finish_eagle3(found: Checkpoint, source: str) -> Checkpoint:
    """Check the values: dtypes, the vocabulary map; make what may be left out. Raises: ``IncompatibleDrafter``."""
    floats_only(source, found.tensors)
    tensors = with_output_biases(found)
    if found.config.own_head and found.config.own_embedding:  # a tied head gets memory of its own
        tensors["lm_head.weight"] = _apart(tensors["lm_head.weight"], tensors["embed_tokens.weight"])
    return check_map(replace(found, tensors=tensors), source)


def norm_line(config: DrafterConfig) -> str:
    """Tell which of the variants' norms a drafter has."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    fields = config.to_dict()
    on = [flag for flag in flags if fields[flag]] + (["q_norm, k_norm"] if config.layer_type == "qwen3" else [])
    fed = "normalised" if config.norm_output else "not normalised"
    return f"norms: {', '.join(on) or 'none of the variants'}; what is fed back is {fed}"


def served_flags(config: DrafterConfig) -> dict[str, Any]:
    """Return what SGLang and vLLM read beside the layers' settings; ids in ``eagle_config`` are layer outputs.

    Two keys stand there only where they say something: SafeAILab's loader leaves the target's embedding unread where
    it sees ``target_hidden_size``, and SpecForge before #879 reads ``norm_output: false`` as no norm at all.
    """
    taken = config.aux_layer_boundaries
    wide = config.target_hidden_size != config.hidden_size
    # without ids, engines and authors take the same layers by the published rule
    listed = {IDS: [boundary - 1 for boundary in taken]} if taken else {}
    return {
        "draft_vocab_size": config.draft_vocab_size if config.own_head else None,
        **({"target_hidden_size": config.target_hidden_size} if wide else {}),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        **({"norm_output": True} if config.norm_output else {}),
        **({IDS: list(taken)} if taken else {}),
        "eagle_config": {**listed, "use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc},
    }


def ids_of(listed: LayerIds, options: ReadOptions) -> LayerIds:
    """Return the layer ids of a checkpoint, or the boundaries that the caller gives in their place."""
    given = options.given.get(OURS)
    return listed if given is None else LayerIds(tuple(given), stated=True, by="the caller")


def convention_of(source: Source) -> str:
    """Return how ids in ``eagle_config`` are usually meant: as layer outputs; boundaries with a norm before ``fc``."""
    return BOUNDARY if "input_norm.weight" in eagle3_names(source) else LAYER_OUTPUT


def _ours(name: str) -> str:
    return FIRST + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _apart(tensor: Tensor, other: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() == other.data_ptr() else tensor


def _target_layers(source: Source, options: ReadOptions, reading: Reading) -> int:
    have = options.target.num_layers
    told = reading.layers
    if have and told and have != told:
        raise IncompatibleDrafter(
            f"{source.name} was made for a target of {told} layers and {options.target.name or 'the target'} has "
            f"{have}: load the target it was trained for."
        )
    return have or told


def _features(
    source: Source, reading: Reading, shapes: Mapping[str, tuple[int, ...]], width: int, taken: int
) -> dict[str, Any]:
    if "fc.weight" not in shapes:
        raise IncompatibleDrafter(f"{source.name} lacks the tensors fc.weight: it is incomplete.")
    features = shapes["fc.weight"][1]
    named = reading.settings.get("target_hidden_size")
    named = named or source.config.get("target_hidden_size")
    if features % taken or (named and features != taken * named):
        raise IncompatibleDrafter(
            f"{source.name}: fc.weight reads {features} features, which are not {taken} layers of "
            f"{named or width} each: the layer ids belong to another checkpoint. List as many as it was trained with."
        )
    if not named and features != taken * width and "embed_tokens.weight" not in shapes:
        raise IncompatibleDrafter(
            f"{source.name}: fc.weight reads {features} features, which are not {taken} layers of hidden_size {width}; "
            "for a target of another width, target_hidden_size and embed_tokens.weight are required."
        )
    return {"target_hidden_size": features // taken}


def _norms(source: Source, reading: Reading, names: Mapping[str, str]) -> dict[str, Any]:
    before_fc = "input_norm.weight" in names or "norm_before_fc" in reading.claims
    each = any(name.startswith("fc_norm.") for name in names) or "fc_norm" in reading.claims
    if before_fc and each:
        raise IncompatibleDrafter(
            f"{source.name} has norm_before_fc and fc_norm: one of them is required. Its config or its weights "
            "(input_norm, fc_norm) are of another checkpoint."
        )
    return {
        "norm_before_fc": before_fc,
        "fc_norm": each,
        "norm_before_residual": reading.norm_before_residual,
        "norm_output": reading.norm_output,
    }


def _vocabulary(source: Source, reading: Reading, shapes: Mapping[str, tuple[int, ...]], size: int) -> dict[str, Any]:
    drafted = reading.draft_vocab_size or (shapes["d2t"][0] if "d2t" in shapes else size)
    if drafted > size:
        raise IncompatibleDrafter(
            f"{source.name}: draft_vocab_size {drafted} exceeds vocab_size {size}: at most the target's is required."
        )
    if drafted < size and "d2t" not in shapes:
        raise IncompatibleDrafter(
            f"{source.name} drafts {drafted} of {size} ids and lacks the tensor d2t that says which: it is incomplete."
        )
    return {"draft_vocab_size": drafted, "own_embedding": "embed_tokens.weight" in shapes}


def _owns_head(source: Source, config: DrafterConfig, names: dict[str, str]) -> bool:
    """Tell whose head is used; a head tied to the drafter's own embedding is read from there."""
    if not config.own_embedding and config.hidden_size != config.target_hidden_size:
        raise IncompatibleDrafter(
            f"{source.name} lacks the tensor embed_tokens.weight: the drafter is {config.hidden_size} wide and the "
            f"target {config.target_hidden_size}, so the target's embedding cannot be used."
        )
    if "lm_head.weight" in names:
        return True
    if config.reduces_vocabulary or config.hidden_size != config.target_hidden_size:
        raise IncompatibleDrafter(
            f"{source.name} lacks the tensor lm_head.weight: it drafts {config.draft_vocab_size} of "
            f"{config.vocab_size} ids from states {config.hidden_size} wide, so the target's head cannot be used."
        )
    if source.config.get("tie_word_embeddings") and config.own_embedding:
        names["lm_head.weight"] = names["embed_tokens.weight"]
        return True
    return False


def numbered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of ``layers.k``, as engines and most producers call them."""
    return {name.replace(FIRST, "layers.0.", 1): tensor for name, tensor in tensors.items()}
