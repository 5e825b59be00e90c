"""Which layers a model's cache has, read from its config; layers that cannot be rolled back are refused by name."""

from __future__ import annotations

from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_specgen.errors import UnsupportedTarget

_KEEPS_NOTHING = "DummyLayer"  # transformers 5.17 has no such class: it leaves these layers out
_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def layer_kinds(config: PretrainedConfig) -> list[tuple[str, int | None]]:
    """Return every layer's kind and window, as transformers' own dynamic cache would build them.

    Layers that keep nothing, because they read what another one kept in the same pass, are named too: they are not
    written. Those that transformers leaves out at the end are left out.

    Raises: ``UnsupportedTarget`` for layers that keep anything but keys and values per token.
    """
    text = config.get_text_config(decoder=True)
    settings = text.to_dict()
    layers = DynamicCache(config=text).layers
    count = settings.get("num_hidden_layers", len(layers))
    shared = settings.get("num_kv_shared_layers") or 0
    declared = settings.get("layer_types") or [None] * count
    if not layers or len(layers) not in (count, count - shared) or len(declared) != count:
        raise UnsupportedTarget(
            f"{type(config).__name__} gives {len(layers)} cache layers for {settings.get('num_hidden_layers')} "
            "hidden layers: "
            "one key/value cache per layer that does not share another's is required. Use plain generate()."
        )
    kinds: list[tuple[str, int | None] | None] = []
    for layer, name in zip(layers, declared, strict=False):  # layers that share and are last may be left out
        if type(layer).__name__ == _KEEPS_NOTHING:
            kinds.append(None)
            continue
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        chunked = window is not None and settings.get("attention_chunk_size") == window
        kind = name or ("chunked_attention" if chunked else "sliding_attention" if window else "full_attention")
        if kind not in _KINDS or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            # a subclass keeps more than keys and values: a recurrent state beside them, an index, a compressed copy
            found = repr(name) if name and name not in _KINDS else f"{kind!r} kept in a {type(layer).__name__}"
            raise UnsupportedTarget(
                f"{type(config).__name__} has a layer of kind {found}: only plain {', '.join(_KINDS)} can be rolled "
                "back row by row (recurrent and indexed layers cannot yet). Use plain generate()."
            )
        kinds.append((kind, window))
    kept = [kind for kind in kinds if kind is not None]
    if not kept:
        raise UnsupportedTarget(f"{type(config).__name__} has no layer that keeps keys and values: one is required.")
    if len(set(kept)) != len({kind for kind, _ in kept}):
        raise UnsupportedTarget(
            f"{type(config).__name__} mixes several windows in one layer kind: one window is required."
        )
    return [kind or kept[0] for kind in kinds]  # what is never written may be of any kind
