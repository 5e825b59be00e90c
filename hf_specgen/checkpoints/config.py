"""DrafterConfig: the one configuration of every neural drafter, whatever layout it came from."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from hf_specgen.errors import SpecGenError

METHODS = ("medusa", "eagle", "eagle3")
LAYER_TYPES = ("llama", "qwen3")
PART = "partial_rotary_factor"
# Ways of other models to say how much of a head is rotated, from which base, or how: nobody reads them in a drafter.
OTHER_ROTARY = (
    "rotary_pct",
    "rotary_percentage",
    "rotary_emb_fraction",
    "rotary_emb_base",
    "rotary_base",
    "rotary_dim",
    "rotary_ndims",
    "rotary_embedding_dim",
    "rope_dim",
    "rope_pct",
    "xdrope_section",
)


class DrafterConfig(PretrainedConfig):
    """Describe a neural drafter: its method, its layers, what it takes from the target, how it drafts.

    ``method``: ``medusa``, ``eagle`` or ``eagle3``. ``hidden_size`` is the drafter's, ``target_hidden_size`` the
    target's. ``vocab_size`` is the target's, ``draft_vocab_size`` what the drafter's own head covers.
    ``aux_layer_boundaries``: which residual streams of the target feed the drafter; boundary b is the stream after b
    decoder layers (0: the embeddings; the number of layers: before the final norm). ``rope_parameters`` are
    transformers' own; with ``partial_rotary_factor`` only the first values of every head are rotated.
    ``layer_types``: which layers have the ``sliding_window`` (``sliding_attention``) and which see every earlier token
    (``full_attention``); None: all are alike.
    ``tree``: None (chosen by device), ``"chain"``, a list of paths of ranks (static), or ``{"top_k", "depth",
    "nodes"}`` (dynamic). ``num_tokens``: chain length (None: as many as pay). ``sample``: draw tokens from the
    drafter's law instead of taking its best ones.
    """

    model_type = "hf_specgen"

    def __init__(  # noqa: PLR0913 - a configuration is its list of fields
        self,
        method: str = "eagle3",
        layer_type: str = "llama",
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 4,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        sliding_window: int | None = None,
        layer_types: list[str] | None = None,
        vocab_size: int = 512,
        draft_vocab_size: int | None = None,
        target_hidden_size: int | None = None,
        own_embedding: bool = False,
        own_head: bool = True,
        fc_bias: bool = False,
        aux_layer_boundaries: list[int] | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        num_heads: int = 0,
        num_head_layers: int = 1,
        head_bias: bool = True,
        tree: Any = None,
        num_tokens: int | None = None,
        sample: bool = False,
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.method, self.layer_type = method, layer_type
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act, self.rms_norm_eps = hidden_act, rms_norm_eps
        self.rope_parameters = dict(rope_parameters or {"rope_type": "default", "rope_theta": 10000.0})
        self.max_position_embeddings = max_position_embeddings
        self.attention_bias, self.mlp_bias, self.sliding_window = attention_bias, mlp_bias, sliding_window
        self.layer_types = None if layer_types is None else list(layer_types)
        self.vocab_size, self.draft_vocab_size = vocab_size, draft_vocab_size or vocab_size
        self.target_hidden_size = target_hidden_size or hidden_size
        self.own_embedding, self.own_head = own_embedding, own_head
        self.fc_bias = fc_bias
        self.aux_layer_boundaries = list(aux_layer_boundaries or [])
        self.norm_before_residual, self.norm_before_fc = norm_before_residual, norm_before_fc
        self.fc_norm, self.norm_output = fc_norm, norm_output
        self.num_heads, self.num_head_layers, self.head_bias = num_heads, num_head_layers, head_bias
        self.tree, self.num_tokens, self.sample = tree, num_tokens, sample
        self.target = dict(target or {})
        super().__init__(**kwargs)

    @property
    def reduces_vocabulary(self) -> bool:
        """Tell whether the drafter's head covers only some of the target's ids."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def rotary_size(self) -> int:
        """Return how many values of a head are rotated by position: the first ones, the rest pass as they are.

        Raises: ``SpecGenError`` for a part that is none, and for settings of other models.
        """
        rope = self.rope_parameters
        part = self.rope_parameters.get(PART, 1.0)
        size = int(self.head_dim * part) if isinstance(part, int | float) and 0 < part <= 1 else 0
        others = [name for name in OTHER_ROTARY if rope.get(name)]
        if others or not size or size % 2:
            raise SpecGenError(
                f"rope_parameters={rope} with head_dim={self.head_dim}: {PART} above 0 and at most 1 that leaves an "
                f"even number of values is required{f', not {others[0]}' if others else ''}."
            )
        return size

    @property
    def layer_kinds(self) -> list[str]:
        """Return the kind of every layer. Raises: ``SpecGenError`` for a list that does not fit the layers."""
        usual = "sliding_attention" if self.sliding_window else "full_attention"
        kinds = self.layer_types or [usual] * self.num_hidden_layers
        unknown = set(kinds) - ({"full_attention", "sliding_attention"} if self.sliding_window else {"full_attention"})
        if len(kinds) != self.num_hidden_layers or unknown:
            raise SpecGenError(
                f"layer_types={self.layer_types} with num_hidden_layers={self.num_hidden_layers} and sliding_window="
                f"{self.sliding_window}: full_attention or, with a window, sliding_attention is required of each."
            )
        return kinds

    @property
    def windows(self) -> dict[str, int | None]:
        """Return how far back layers of each kind see, None: to the first token."""
        return {kind: self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_kinds}

    def layer_config(self) -> PretrainedConfig:
        """Return the transformers configuration that the drafter's decoder layers are built from."""
        shared: dict[str, Any] = {
            name: self.to_dict()[name]
            for name in (
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
                "vocab_size",
            )
        }
        rope = {name: value for name, value in self.rope_parameters.items() if name != PART}
        if self.rotary_size < self.head_dim:
            rope[PART] = self.rope_parameters[PART]
        if self.layer_type == "qwen3":
            if self.mlp_bias:  # a checkpoint with them could be trained and never saved
                raise SpecGenError("mlp_bias=True with layer_type='qwen3': Qwen3's layers have no such biases.")
            windows = {"use_sliding_window": True, "layer_types": self.layer_kinds} if self.sliding_window else {}
            layer = Qwen3Config(**shared, rope_parameters=rope, sliding_window=self.sliding_window, **windows)
        else:
            layer = LlamaConfig(**shared, rope_parameters=rope, mlp_bias=self.mlp_bias)
            if self.sliding_window:  # Llama's own attention knows no window: the cache and its mask do
                layer.sliding_window = self.sliding_window
                layer.layer_types = self.layer_kinds
        layer.use_qk_norm = self.layer_type == "qwen3"  # what attention that rotates a part of a head asks for
        layer._attn_implementation = self._attn_implementation or "sdpa"
        return layer
