"""DrafterConfig: what the configurations of all neural drafters share, whatever layout they came from."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from hf_specgen.checkpoints.methods import config_class, field_names
from hf_specgen.errors import SpecGenError

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
    """Describe a neural drafter of any method: what it takes from the target, what it covers, how it drafts.

    ``DrafterConfig(method="eagle3", ...)`` makes the configuration of that method, a subclass in the drafter's own
    file, which adds fields of its own. Fields of other methods are left out: one set of sizes may serve several.

    ``hidden_size`` is the drafter's, ``target_hidden_size`` the target's. ``vocab_size`` is the target's,
    ``draft_vocab_size`` what the drafter's own head covers. ``aux_layer_boundaries``: which residual streams of the
    target feed the drafter; boundary b is the stream after b decoder layers (0: the embeddings; the number of layers:
    before the final norm). ``own_embedding`` and ``own_head``: False where the target's are read.
    ``tree``: None (chosen by device), ``"chain"``, a list of paths of ranks (static), or ``{"top_k", "depth",
    "nodes"}`` (dynamic). ``num_tokens``: chain length (None: as many as pay). ``sample``: draw tokens from the
    drafter's law instead of taking its best ones. ``target``: what is known of the target that it was made for.

    Raises: ``IncompatibleDrafter`` for a method that is not known.
    """

    model_type = "hf_specgen"
    method = ""
    architecture = "SpecGenDrafter"
    """What ``config.json`` calls the drafter, where engines may read it."""
    embeds_tokens = True
    """Whether the drafter reads token embeddings at all, its own or the target's."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the parent's ``__init__`` where a subclass adds no fields: transformers would make one that skips it."""
        if "__init__" not in vars(cls):

            def __init__(self: DrafterConfig, method: str | None = None, **kwargs: Any) -> None:
                super(cls, self).__init__(method, **kwargs)

            cls.__init__ = __init__  # type: ignore[method-assign, assignment]
        cls.__eq__ = DrafterConfig.__eq__  # type: ignore[method-assign]  # theirs compares none of our fields
        super().__init_subclass__(**kwargs)

    def __new__(cls, method: str = "eagle3", **fields: Any) -> DrafterConfig:
        """Make the configuration of a method."""
        kind = cls if cls.method else config_class(method)
        return object.__new__(kind)

    def __init__(  # noqa: PLR0913 - a configuration is its list of fields
        self,
        method: str | None = None,
        hidden_size: int = 64,
        vocab_size: int = 512,
        draft_vocab_size: int | None = None,
        target_hidden_size: int | None = None,
        own_embedding: bool = False,
        own_head: bool = True,
        aux_layer_boundaries: list[int] | None = None,
        tree: Any = None,
        num_tokens: int | None = None,
        sample: bool = False,
        target: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if method not in (None, self.method):
            raise SpecGenError(f"{type(self).__name__} got method={method!r}: {self.method!r} is required, or none.")
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self.target_hidden_size = target_hidden_size or hidden_size
        self.own_embedding = own_embedding
        self.own_head = own_head
        self.aux_layer_boundaries = list(aux_layer_boundaries or [])
        self.tree = tree
        self.num_tokens = num_tokens
        self.sample = sample
        self.target = dict(target or {})
        foreign = set(field_names())
        super().__init__(**{name: value for name, value in kwargs.items() if name not in foreign})

    def __eq__(self, other: object) -> bool:
        """Tell whether the other is of the same method and says the same."""
        return isinstance(other, DrafterConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # a configuration changes

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of all fields, without ``method``."""
        classes = [kind for kind in cls.__mro__ if issubclass(kind, DrafterConfig)]
        names = [name for kind in reversed(classes) for name in signature(vars(kind)["__init__"]).parameters]
        return tuple(name for name in dict.fromkeys(names) if name not in ("self", "method", "kwargs"))

    @classmethod
    def check_fields(cls, given: Mapping[str, Any]) -> None:
        """Refuse settings that are another method's. Raises: ``SpecGenError`` naming them and the method's own."""
        foreign = sorted(set(given) - set(cls.field_names()))
        if foreign:
            raise SpecGenError(
                f"{', '.join(foreign)}: no field of a drafter of method {cls.method!r}, which has "
                f"{', '.join(sorted(cls.field_names()))}."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, the method among them."""
        return {**super().to_dict(), "method": self.method}

    @property
    def deepest(self) -> int | None:
        """Return how many tokens a draft can have at most, None where nothing in the drafter bounds it."""
        return None

    @property
    def states_read(self) -> str:
        """Say which hidden states of the target the drafter reads."""
        return "the input of the language-model head"

    @property
    def lent(self) -> tuple[str, ...]:
        """Say which matrices of the target the drafter reads."""
        embedding = () if self.own_embedding or not self.embeds_tokens else ("its token embedding",)
        head = () if self.own_head else ("its language-model head",)
        return (*embedding, *head)

    @property
    def size(self) -> str:
        """Say in a line how large the drafter is."""
        return f"hidden size {self.hidden_size}, vocabulary {self.draft_vocab_size} of {self.vocab_size}"

    @property
    def facts(self) -> dict[str, str]:
        """Return what a model card lists of the drafter's build, by label."""
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Say what a reader of a checkpoint of ours may want to see, a line each."""
        return ()

    @property
    def served_as(self) -> str:
        """Return what engines may take the drafter for: a name that nobody knows where they would serve another one."""
        some_rows_of_the_head = self.reduces_vocabulary and not self.own_head  # nobody reads that
        return DrafterConfig.architecture if some_rows_of_the_head else self.architecture

    @property
    def served_flags(self) -> dict[str, Any]:
        """Return what engines read of the method at the top of ``config.json``."""
        return {}

    @property
    def dropped_by_vllm(self) -> tuple[str, ...]:
        """Return the tensors that vLLM has no place for and skips (read in its source and run, version 0.32.0)."""
        return ()

    @property
    def head_names(self) -> tuple[str, ...]:
        """Return the names of the drafter's own heads, none where it reads the target's."""
        return ("lm_head.weight",) if self.own_head else ()

    @property
    def reduces_vocabulary(self) -> bool:
        """Tell whether the drafter's head covers only some of the target's ids."""
        return self.draft_vocab_size < self.vocab_size


class FeatureConfig(DrafterConfig):
    """Describe a drafter with decoder layers that are fed the target's features.

    ``layer_type``: ``llama`` or ``qwen3``. ``rope_parameters`` are transformers' own; with ``partial_rotary_factor``
    only the first values of every head are rotated. ``layer_types``: which layers have the ``sliding_window``
    (``sliding_attention``) and which see every earlier token (``full_attention``); None: all are alike. ``fc_bias``:
    of the matrix that joins the features.
    """

    def __init__(  # noqa: PLR0913 - a configuration is its list of fields
        self,
        method: str | None = None,
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
        fc_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        self.layer_type = layer_type
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = dict(rope_parameters or {"rope_type": "default", "rope_theta": 10000.0})
        self.max_position_embeddings = max_position_embeddings
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.sliding_window = sliding_window
        self.layer_types = None if layer_types is None else list(layer_types)
        self.fc_bias = fc_bias
        super().__init__(method, hidden_size, **kwargs)

    @property
    def size(self) -> str:
        """Say in a line how large the drafter is."""
        return (
            f"{self.num_hidden_layers} layer(s), hidden size {self.hidden_size}, {self.num_attention_heads} heads "
            f"({self.num_key_value_heads} for keys) of {self.head_dim}, MLP {self.intermediate_size}, vocabulary "
            f"{self.draft_vocab_size} of {self.vocab_size}"
        )

    @property
    def facts(self) -> dict[str, str]:
        """Return what a model card lists of the drafter's build, by label."""
        return {
            "layers": f"{self.num_hidden_layers} of hidden size {self.hidden_size} ({self.layer_type})",
            "positions": f"up to {self.max_position_embeddings}",
        }

    @property
    def dropped_by_vllm(self) -> tuple[str, ...]:
        """Return the biases that vLLM has no place for and skips (read in its source and run, version 0.32.0)."""
        fc = ("fc.bias",) if self.fc_bias else ()
        output = ("self_attn.o_proj.bias",) if self.layer_type == "qwen3" and self.attention_bias else ()
        return (*fc, *output)

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
