"""What layouts share: names without prefixes, layer settings, windows, refusals, and how a folder is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from hf_specgen.checkpoints.config import PART, DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, ReadOptions, Source, check_names
from hf_specgen.checkpoints.formats.found import Found
from hf_specgen.checkpoints.formats.rope import DEFAULT_BASE, rope_of
from hf_specgen.checkpoints.methods import state_shapes
from hf_specgen.errors import IncompatibleDrafter

QUANTISED = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_packed",
    "weight_zero_point",
    "input_scale",
    "k_scale",
    "v_scale",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Kept under a name of its own while a checkpoint is read: looked at, then dropped.
PROBE = "probe:"


def short_names(source: Source, *prefixes: str) -> dict[str, str]:
    """Return the checkpoint's names without the first of ``prefixes`` that fits, mapped to the full ones.

    Raises: ``IncompatibleDrafter`` when two tensors come to the same name.
    """
    found: dict[str, str] = {}
    for name in source.shapes:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        short = name.removeprefix(prefix)
        if short in found:
            raise IncompatibleDrafter(
                f"{source.name} holds both {found[short]!r} and {name!r}, which are the same tensor of a drafter: "
                "one of them is required. Remove the other from the file."
            )
        found[short] = name
    return found


def refuse_unreadable(source: Source, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse quantised weights, adapters and latent attention by name; return warnings about what may be one."""
    scales = sorted(name for name in source.shapes if name.rpartition(".")[2] in QUANTISED)
    for key in ("quantization_config", "compression_config"):
        if source.config.get(key) or settings.get(key):
            scales = [*scales, f"{key} in config.json"]
    if scales:
        raise IncompatibleDrafter(
            f"{source.name} holds quantised weights ({', '.join(scales[:4])}): float16, bfloat16 or float32 are "
            "required. Load the unquantised drafter, or dequantise it with the tool that wrote it."
        )
    if "adapter_model.safetensors" in source.files:
        raise IncompatibleDrafter(
            f"{source.name} comes with adapter_model.safetensors, which changes the target it was trained beside: "
            "merging adapters is not supported. Merge it into the target and remove it from the folder."
        )
    latent = sorted(name for name in source.shapes if "kv_a_proj" in name or "kv_b_proj" in name)
    named = [name for name in source.config.get("architectures") or () if "Deepseek" in name]
    if latent or named:
        raise IncompatibleDrafter(
            f"{source.name} uses multi-head latent attention ({', '.join((named + latent)[:2])}): a drafter with "
            "Llama or Qwen3 layers is required."
        )
    if "hf_quant_config.json" in source.files:
        return ("hf_quant_config.json lies beside the weights, but no tensor is quantised: they are read as they are.",)
    return ()


def required(source: Source, settings: Mapping[str, Any], key: str) -> Any:
    """Return a setting that has no default. Raises: ``IncompatibleDrafter`` naming it."""
    value = settings.get(key)
    if value is None:
        raise IncompatibleDrafter(f"the config of {source.name} has no {key!r}: it is required to build the drafter.")
    return value


def layer_fields(source: Source, settings: Mapping[str, Any], names: Mapping[str, str], first: str) -> dict[str, Any]:
    """Return the fields of ``DrafterConfig`` that say how layers are built; ``first`` begins the first one's names.

    How many layers there are, how wide their heads, which biases and norms they have is read off the tensors: configs
    are often copies of the target's.
    """
    width = required(source, settings, "hidden_size")
    heads = required(source, settings, "num_attention_heads")
    return {
        "layer_type": "qwen3" if f"{first}self_attn.q_norm.weight" in names else "llama",
        "hidden_size": width,
        "intermediate_size": required(source, settings, "intermediate_size"),
        "num_hidden_layers": layers_in(names),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("num_key_value_heads") or heads,
        "head_dim": _head_dim(source, settings, names, first),
        "hidden_act": settings.get("hidden_act") or "silu",
        "rms_norm_eps": settings.get("rms_norm_eps") or 1e-6,
        "max_position_embeddings": settings.get("max_position_embeddings") or 2048,
        "attention_bias": f"{first}self_attn.q_proj.bias" in names,
        "mlp_bias": f"{first}mlp.gate_proj.bias" in names,
        "fc_bias": "fc.bias" in names,
        "vocab_size": required(source, settings, "vocab_size"),
    }


def layers_in(names: Mapping[str, str]) -> int:
    """Return how many decoder layers there are by our names of the tensors; the first one always is."""
    numbers = [name.split(".")[1] for name in names if name.startswith("layers.")]
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=0)


def _head_dim(source: Source, settings: Mapping[str, Any], names: Mapping[str, str], first: str) -> int:
    """Return how wide a head is by the first layer's tensors; by the config where they fit no number of heads."""
    heads = settings["num_attention_heads"]
    said = int(settings.get("head_dim") or settings["hidden_size"] // heads)
    parts = ("q_proj", "k_proj", "q_norm")
    shapes = {part: source.shapes.get(names.get(f"{first}self_attn.{part}.weight", ""), ()) for part in parts}
    rows = {part: shape[0] if shape else 0 for part, shape in shapes.items()}
    found = rows["q_norm"] or rows["q_proj"] // heads
    counts = {"q_proj": heads, "k_proj": settings.get("num_key_value_heads") or heads}
    return found if found and all(rows[part] == found * count for part, count in counts.items()) else said


def overruled(settings: Mapping[str, Any], fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Say where the tensors contradict what a config says about the layers."""
    said = {name: settings.get(name) for name in ("num_hidden_layers", "head_dim")}
    wrong = {name: value for name, value in said.items() if value not in (None, fields[name])}
    return tuple(f"config says {name}={value}, the tensors say {fields[name]}" for name, value in wrong.items())


def rope_and_window(
    source: Source, settings: Mapping[str, Any], fields: Mapping[str, Any], options: ReadOptions, followed: bool
) -> tuple[Found, Found]:
    """Return rotary settings and window of the layers: what the caller gives, else what the config says.

    ``followed``: see ``window_of``. Raises: ``IncompatibleDrafter`` as ``rope_of`` and ``window_of`` do.
    """
    given = options.given
    if given.get("rope_parameters") is not None:
        rope = Found.given("rope", dict(given["rope_parameters"]))
    else:
        rope = rope_of(source, settings, fields["head_dim"], fields["num_hidden_layers"])
    if "sliding_window" in given:
        window = Found.given("sliding window", given["sliding_window"])
        return rope, replace(window, value=windowed(window.value, given.get("layer_types")))
    return rope, window_of(source, settings, followed)


def window_of(source: Source, settings: Mapping[str, Any], followed: bool = True) -> Found:
    """Return the fields of ``DrafterConfig`` for the layers' window. Raises: ``IncompatibleDrafter`` for other kinds.

    ``followed``: False for producers whose layers attend to every token, whatever ``layer_types`` says.
    """
    layers = settings.get("num_hidden_layers") or 1
    size = settings.get("sliding_window")
    kinds = list(settings.get("layer_types") or [])[:layers]
    full_until = settings.get("max_window_layers")
    if not kinds and settings.get("model_type") == "qwen3" and settings.get("use_sliding_window") and size:
        kinds = ["sliding_attention" if index >= (full_until or 0) else "full_attention" for index in range(layers)]
    if not followed:
        return _everything(kinds, size)
    if not kinds or set(kinds) == {"full_attention"}:
        unused = f" (sliding_window {size} is named, but no layer is of that kind)" if size else ""
        return Found(windowed(None), f"attention: every earlier token{unused}")
    sliding = isinstance(size, int) and size > 0 and len(kinds) == layers
    if sliding and set(kinds) == {"sliding_attention"}:
        return Found(windowed(size), f"attention: a sliding window of {size} tokens in every layer")
    if sliding and set(kinds) == {"sliding_attention", "full_attention"}:
        some = ", ".join(str(index) for index, kind in enumerate(kinds) if kind == "sliding_attention")
        return Found(windowed(size, kinds), f"attention: a sliding window of {size} tokens in layer {some}, else every")
    raise IncompatibleDrafter(
        f"{source.name} has layer_types {kinds} and sliding_window {size!r}: full_attention, or sliding_attention with "
        f"a window, is required of each of its {layers} layers."
    )


def windowed(size: int | None, kinds: list[str] | None = None) -> dict[str, Any]:
    """Return the fields of ``DrafterConfig`` for a window of all layers, or of those that ``kinds`` tells."""
    return {"sliding_window": size, "layer_types": kinds}


def _everything(kinds: list[str], size: int | None) -> Found:
    warnings: tuple[str, ...] = ()
    if set(kinds) - {"full_attention"}:
        line = f"layer_types {kinds} is not followed: layers of this layout attend to every earlier token. Pass "
        warnings = (f"{line}sliding_window={size} if the drafter was trained otherwise.",)
    return Found(windowed(None), "attention: every earlier token", warnings)


def match(
    source: Source,
    names: Mapping[str, str],
    config: DrafterConfig,
    made: frozenset[str] = frozenset(),
    dropped: frozenset[str] = frozenset(),
    spoken: Callable[[str], str] = str,
) -> dict[str, str]:
    """Map the drafter's tensors to the file's: nothing missing, nothing left over, every shape right.

    ``names``: our names to the file's. ``made``: tensors of ours that are made when they are absent. ``dropped``:
    what may be there and is not used. ``spoken``: how the layout calls a tensor of ours, for the error.
    Raises: ``IncompatibleDrafter`` naming tensors.
    """
    wanted = {name: shape for name, shape in state_shapes(config).items() if name in names or name not in made}
    found = {name: names[name] for name in wanted if name in names}
    unused = {full for short, full in names.items() if short in dropped or short.endswith("rotary_emb.inv_freq")}
    check_names(source, found.values(), unused, [spoken(name) for name in wanted if name not in names])
    for name, full in found.items():
        if tuple(source.shapes[full]) != wanted[name]:
            raise IncompatibleDrafter(
                f"{source.name}: {full} has the shape {list(source.shapes[full])} and its config asks for "
                f"{list(wanted[name])}. The config belongs to another checkpoint, or the file is damaged."
            )
    return found


def output_biases(config: DrafterConfig) -> frozenset[str]:
    """Return the biases that Qwen2's layers lack beside those of queries, keys and values: zeros where absent."""
    return frozenset(name for name in state_shapes(config) if name.endswith("self_attn.o_proj.bias"))


def with_output_biases(found: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors with zeros for the output biases that are absent."""
    tensors = dict(found.tensors)
    for name in output_biases(found.config) - set(tensors):
        like = tensors[name.replace("o_proj", "q_proj")]
        tensors[name] = torch.zeros(found.config.hidden_size, dtype=like.dtype)
    return tensors


def floats_only(source: str, tensors: Mapping[str, Tensor], integers: tuple[str, ...] = ("d2t", "t2d")) -> None:
    """Refuse weights that are no plain floats. Raises: ``IncompatibleDrafter`` naming tensor and dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS and name.removeprefix(PROBE) not in integers:
            raise IncompatibleDrafter(
                f"{source}: {name} is of dtype {tensor.dtype}, so the checkpoint is quantised: float16, bfloat16 or "
                "float32 are required. Load the unquantised drafter."
            )


def vocabulary_line(config: DrafterConfig) -> str:
    """Tell how many of the target's ids a drafter can draft."""
    if config.reduces_vocabulary:
        return f"vocabulary: drafts {config.draft_vocab_size} of the target's {config.vocab_size} ids (map d2t)"
    return f"vocabulary: all {config.vocab_size} ids of the target"


def head_lines(config: DrafterConfig) -> tuple[str, str]:
    """Tell whose embedding and whose head a drafter uses."""
    embedding = "the drafter's own" if config.own_embedding else "the target's"
    head = "the drafter's own" if config.own_head else "the target's"
    return (f"embedding: {embedding}", f"head: {head}")


def store(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str = "model.safetensors"
) -> None:
    """Write ``config.json`` and a file of tensors; each tensor gets memory of its own, maps their own dtypes."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in sorted(tensors.items())}
    half = folder / f".{file}.part"
    save_file(kept, half, metadata={"format": "pt"})
    half.replace(folder / file)  # loaded tensors may still map the old file: it must not be overwritten
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2, sort_keys=True) + "\n")


def common_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what every config says under the names that transformers and engines use."""
    dtype = dtype_of(checkpoint.tensors)
    return {
        "hidden_size": checkpoint.config.hidden_size,
        "vocab_size": checkpoint.config.vocab_size,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        "transformers_version": transformers.__version__,
    }


def layer_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the layers' settings under the names that transformers and engines use, rope in both styles."""
    config = checkpoint.config
    rope = dict(config.rope_parameters)
    base = rope.pop("rope_theta", DEFAULT_BASE)
    plain = (
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
        "sliding_window",
    )
    fields = config.to_dict()
    return common_settings(checkpoint) | {
        **{name: fields[name] for name in plain},
        "model_type": config.layer_type,
        "rope_theta": base,
        "rope_scaling": rope_scaling(rope),
        "rope_parameters": {**rope, "rope_theta": base},
        **({PART: rope[PART]} if PART in rope else {}),  # SGLang reads it there, vLLM in either place
        "layer_types": config.layer_kinds,
        "use_sliding_window": bool(config.sliding_window),
    }


def rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``rope_scaling`` as configs spelled it before transformers 5, None for plain rope.

    The kind stands there under both of its names: SafeAILab's loader reads ``type`` and stops without it.
    """
    kind = rope.get("rope_type", "default")
    return None if kind == "default" else {**rope, "rope_type": kind, "type": kind}


def dtype_of(tensors: Mapping[str, Tensor]) -> str:
    """Return the dtype that most weights have, as configs spell it."""
    counts: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in FLOATS:
            name = str(tensor.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + tensor.numel()
    return max(counts, key=lambda name: counts[name], default="float32")
