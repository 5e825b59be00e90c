"""LearnedDrafter: what Medusa heads and EAGLE heads share: one config, a target they fit, files they live in."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from huggingface_hub import HfApi
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specgen.checkpoints.card import CARD, CardOptions, write_card
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.files import hub_errors
from hf_specgen.checkpoints.formats.base import Checkpoint, ReadOptions, layout_named
from hf_specgen.checkpoints.formats.shortlist import shortened
from hf_specgen.checkpoints.opening import Opened, Report, open_checkpoint
from hf_specgen.drafting.borrowed import TargetParts
from hf_specgen.drafting.drafter import Drafter, Reads, missing
from hf_specgen.drafting.shapes import StaticShape, in_target_ids, parse_shape
from hf_specgen.errors import IncompatibleDrafter, SpecGenError, reason_of
from hf_specgen.models.facts import TargetFacts, holds_numbers
from hf_specgen.models.wrappers import bare, input_device
from hf_specgen.round.costs import Costs

_EMBEDDING = "embed_tokens.weight"
_ROWS = 4096  # of an embedding that are compared at once
_SAVING = ("state_dict", "is_main_process", "safe_serialization", "save_function", "max_shard_size", "variant")

AnyLearned = TypeVar("AnyLearned", bound="LearnedDrafter")


class ObjectiveResult(Protocol):
    """Hold what an objective returns for N rows; ``trainers/losses.py`` tells what each part means."""

    @property
    def loss_sum(self) -> Tensor:
        """Return the weighted sum of the rows' losses."""

    @property
    def hits(self) -> Tensor:
        """Return where the drafter's best id is the target's, ``(N,)`` bool."""

    @property
    def alpha(self) -> Tensor:
        """Return the sums of ``min(p, q)``, ``(N,)``."""

    @property
    def match(self) -> Tensor:
        """Return where the drafter's best id is the text's own, ``(N,)`` bool."""

    @property
    def ratio(self) -> Tensor:
        """Return ``min(1, q(x) / p(x))`` of the text's own ids, ``(N,)``."""


Objective = Callable[..., ObjectiveResult]
"""Compares a drafter's law with the target's, row by row: ``trainers.losses.Objective``."""


class TrainingOutput(NamedTuple):
    """Hold what a drafter's training forward returns: sums, so that the parts of a batch add up to the whole.

    Shapes: ``loss_sum`` scalar; ``counts (K, 4)`` float32, per depth: pairs that are supervised, best ids that equal
    the target's, the sum of ``min(p, q)``, drafts that are right so far. ``rates (B, T, K)``, only when asked for: how
    likely the draft's k-th token behind the first ``t + 2`` tokens of a text is accepted there, NaN where nothing is
    supervised.
    """

    loss_sum: Tensor
    counts: Tensor
    rates: Tensor | None = None


class LearnedDrafter(PreTrainedModel, Drafter):
    """Draft with trained heads or layers that read the target's hidden states.

    A drafter is a ``PreTrainedModel``: ``save_pretrained`` writes the layout that vLLM and SGLang read too,
    ``from_pretrained`` reads any known layout, ``push_to_hub`` adds a model card.
    """

    config_class: type[Any] = DrafterConfig
    config: DrafterConfig
    base_model_prefix = ""
    main_input_name = "input_ids"
    method: ClassVar[str]
    hidden_layers: tuple[int, ...] = ()
    """Which of the target's hidden states the drafter reads, see ``Reads.hidden``."""

    report: Report | None
    """What was found and decided when the drafter was loaded; None for a new one."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        check_drafts(config)
        self._parts: TargetParts | None = None
        self._borrowed: WeakKeyDictionary[PreTrainedModel, TargetParts] = WeakKeyDictionary()
        self.costs: Costs | None = None
        self.confidence: float | None = None
        self.report = None

    def __getattr__(self, name: str) -> Any:
        """Look where modules keep their parts; say what to do where a model that is not enabled was given a drafter."""
        if name == "generation_config":
            raise missing(self, name)
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Leave targets out: copies and pickles of a drafter never hold them, they borrow again when they draft."""
        return {**self.__dict__, "_parts": None, "_borrowed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Borrow nothing yet."""
        super().__setstate__(state)
        self._borrowed = WeakKeyDictionary()

    @property
    def parts(self) -> TargetParts:
        """Return what was borrowed. Raises: ``IncompatibleDrafter`` before ``attach``."""
        if self._parts is None:
            raise IncompatibleDrafter(
                f"{type(self).__name__} has no target yet: call drafter.attach(model), or load it with "
                "load_drafter(..., target=model)."
            )
        return self._parts

    @property
    def draws(self) -> bool:
        """Tell whether the config asks for drawn tokens."""
        return self.config.sample

    @property
    def target_ids(self) -> Tensor | None:
        """Return the target's id of each of the drafter's ids ``(V_draft)``, None when they are the same."""
        offsets = self._buffers.get("d2t")
        return None if offsets is None else offsets + torch.arange(len(offsets), device=offsets.device)

    def to_target(self, picks: Tensor) -> Tensor:
        """Return the target's ids of the drafter's; absent ones stay absent."""
        return in_target_ids(picks, self.target_ids)

    def get_input_embeddings(self) -> None:
        """Return None: sharding must leave the embedding with the whole, which reads its weight."""

    def get_output_embeddings(self) -> None:
        """Return None, for the same reason."""

    def reads(self, model: PreTrainedModel) -> Reads:
        """Return the hidden states that the drafter reads of a target. Raises and warns as ``attach`` does."""
        return Reads(hidden=self.boundaries(self.parts_of(model).facts))

    def boundaries(self, facts: TargetFacts | None) -> tuple[int, ...]:
        """Return the boundaries of a target whose hidden states the drafter reads."""
        return self.hidden_layers

    def attach(self, model: nn.Module) -> None:
        """Keep what is borrowed of a target, for training and for the calls on it.

        Calls of ``generate()`` need no attaching: each borrows from its own target.
        Raises: ``IncompatibleDrafter`` for other sizes. Warns: when the fingerprint is another target's.
        """
        self._parts = self.parts_of(bare(model))

    def parts_of(self, model: PreTrainedModel) -> TargetParts:
        """Return what the drafter borrows of a target; kept beside the target's own life, so that it is taken once.

        Raises and warns as ``attach`` does.
        """
        ids = None if self.config.own_head else self.target_ids
        kept = self._borrowed.get(model)
        if kept is not None and kept.belong_to(model, ids):
            return kept
        parts = TargetParts.of(model)
        self.check_target(parts.facts)
        self.check_backbone(model)
        self._borrowed[model] = parts.narrowed(ids)
        return self._borrowed[model]

    def check_backbone(self, model: PreTrainedModel) -> None:
        """Refuse a target whose layers are not those that the drafter was trained with, where that matters."""

    def check_target(self, facts: TargetFacts) -> None:
        """Compare the sizes a drafter was made for with a target's. Raises and warns as ``attach`` does."""
        check_fit(self.config, facts)
        known = self.config.target.get("fingerprint")
        if known and facts.fingerprint and known != facts.fingerprint:
            warnings.warn(
                f"the drafter was trained for another target{trained_for(self.config)} than "
                f"{facts.name or 'the target'}: the text stays exact, fewer drafts may be accepted.",
                stacklevel=3,
            )

    def embed(self, tokens: Tensor, parts: TargetParts | None = None) -> Tensor:
        """Return token embeddings ``(..., H)``, the drafter's own or the target's raw rows; ids beyond it clamp.

        ``parts``: what is borrowed of the target, by default of the one that was attached.
        """
        own = self._modules.get("embed_tokens")
        if own is not None:
            weight = cast(Tensor, own.weight)
        else:
            weight = (parts or self.parts).embedding
        return F.embedding(tokens.clamp(0, weight.shape[0] - 1), weight)

    def score(self, states: Tensor, parts: TargetParts | None = None) -> Tensor:
        """Return logits over the drafter's vocabulary from normalised states: its own head, or the target's.

        ``parts``: as in ``embed``.
        """
        own = self._modules.get("lm_head")
        if own is not None:
            return cast(Tensor, own(states))
        return (parts or self.parts).logits(states)

    def shortened(self: AnyLearned, ids: Tensor) -> AnyLearned:
        """Return a drafter that drafts only ``ids (n)``, target ids that the text is likely to hold; it reads less.

        What is drafted changes, never the text. All other weights are shared; ``save_pretrained`` keeps the choice.
        Counting: ``trainers.vocabulary``, or ``hf-specgen convert --draft-vocab-size``.
        Raises: ``SpecGenError`` for ids that are none, stand twice, or that this drafter does not draft.
        """
        said = self.report
        found = shortened(replace(self.checkpoint(), notes=said.notes if said else ()), ids)
        drafter = assemble(type(self), found, self.dtype, self.device)
        drafter.report = replace(said, config=drafter.config, notes=found.notes) if said else None
        drafter.costs = self.costs
        drafter.confidence = self.confidence
        return drafter.train(self.training)

    def checkpoint(self) -> Checkpoint:
        """Return config and tensors as a layout's ``write`` takes them."""
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        return Checkpoint(self.config, tensors, "specgen")

    @classmethod
    def from_pretrained(
        cls: type[AnyLearned],
        name: str | Path,
        *args: Any,
        target: nn.Module | None = None,
        aux_layer_convention: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        **settings: Any,
    ) -> AnyLearned:
        """Load a drafter of this class, as ``load_drafter`` does.

        Raises: ``IncompatibleDrafter`` for a checkpoint of another method, and as ``load_drafter`` does.
        """
        model = bare(target) if target is not None else None
        facts = TargetFacts.of(model) if model is not None else TargetFacts()
        opened = open_checkpoint(name, ReadOptions(facts, aux_layer_convention), settings)
        return cls.load(opened, model, dtype, device)

    @classmethod
    def load(
        cls: type[AnyLearned],
        opened: Opened,
        target: PreTrainedModel | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> AnyLearned:
        """Read an opened checkpoint's tensors and build the drafter around them; none is ever made up.

        ``dtype`` and ``device``: by default the target's, without a target the file's and the CPU.
        """
        if opened.config.method != cls.method:
            raise IncompatibleDrafter(
                f"{opened.source.name} holds a {opened.config.method} drafter and {cls.__name__} loads {cls.method}: "
                "use load_drafter, which picks the class."
            )
        if target is not None:
            check_fit(opened.config, opened.options.target)
        cls.skeleton(opened.config)  # what the class refuses is refused before weights are read
        found = opened.read()
        if target is not None:
            found = borrow_embedding(found, target.get_input_embeddings().weight)
            device = input_device(target) if device is None else device
            dtype = target.dtype if dtype is None else dtype
        kind = dtype_named(dtype, found.tensors)
        drafter = assemble(cls, found, kind, torch.device(device or "cpu"))
        drafter.report = opened.told(found.config, found.notes, found.warnings)
        if target is not None:
            drafter.attach(target)
        return drafter

    @classmethod
    def usual_fields(cls, facts: TargetFacts, steps: int | None = None) -> dict[str, Any]:
        """Return the fields that a new drafter of the method has, beside the sizes of its target.

        ``steps``: how far a draft is to reach, where the drafter's build bounds it; None: as usual.
        """
        return {}

    @classmethod
    def new(
        cls: type[AnyLearned], target: PreTrainedModel, ids: Tensor | None = None, warm: bool = True, **settings: Any
    ) -> tuple[AnyLearned, list[str]]:
        """Build a drafter to train, in float32 on the CPU; here with random weights, whatever ``warm`` asks for.

        ``ids (V_draft)``: the target's ids that it covers, None for all. ``warm``: begin with the target's weights.
        ``settings`` go to the configuration. Returns: the drafter, and in words what was taken from the target.
        Raises: ``SpecGenError`` for settings that build none, or ``ids`` where the method covers all.
        """
        if ids is not None:
            raise SpecGenError(f"ids= was given: new drafters of method {cls.method!r} cover all ids. Leave it out.")
        facts = TargetFacts.of(target)
        fields = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size, "target": facts.to_dict()}
        config = cls.config_class(**{**fields, **cls.usual_fields(facts), **settings})
        return cls(config).float(), ["random weights"]

    @classmethod
    def skeleton(cls: type[AnyLearned], config: DrafterConfig) -> AnyLearned:
        """Build a drafter without memory. Raises: ``IncompatibleDrafter`` for settings that build none."""
        try:
            with torch.device("meta"):
                return cls(config)
        except SpecGenError:
            raise
        except (KeyError, ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
            raise IncompatibleDrafter(
                f"the config of the checkpoint builds no {cls.__name__}: {type(error).__name__}: {reason_of(error)}. "
                "Get it anew."
            ) from error

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write config and weights; ``state_dict=`` replaces the weights (as ``Trainer`` asks)."""
        unknown = sorted(set(kwargs) - set(_SAVING))
        if unknown:
            raise SpecGenError(
                f"save_pretrained does not know {', '.join(unknown)}: it takes {', '.join(_SAVING)}. To upload, call "
                "drafter.push_to_hub(repo_id)."
            )
        if not kwargs.get("is_main_process", True):
            return
        found = self.checkpoint()
        state = kwargs.get("state_dict")
        if state is not None:
            found = Checkpoint(found.config, {name: state[name] for name in found.tensors}, found.layout)
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        layout_named("specgen").write(found, folder)

    def push_to_hub(  # noqa: PLR0913 - keywords of push_to_hub
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        card: CardOptions | None = None,
        overwrite_card: bool = False,
    ) -> str:
        """Upload config, weights and a model card, and return the address of the commit.

        A README.md that is there stays as it is unless ``overwrite_card``.

        Raises: ``SpecGenError`` when the Hub refuses.
        """
        api = HfApi(token=token)
        with hub_errors(repo_id), tempfile.TemporaryDirectory() as name:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            folder = Path(name)
            self.save_pretrained(folder)
            if overwrite_card or not api.file_exists(repo_id, CARD, revision=revision):
                options = card or CardOptions()
                write_card(folder, options if options.name else replace(options, name=repo_id))
            done = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or f"Upload {self.config.method} drafter",
                revision=revision,
                create_pr=create_pr,
            )
        return str(done.commit_url)


def assemble(kind: type[AnyLearned], found: Checkpoint, dtype: torch.dtype, device: torch.device) -> AnyLearned:
    """Build a drafter whose every tensor is the checkpoint's; integers and masks keep their dtype.

    Raises: ``IncompatibleDrafter`` when names or shapes are not the module's.
    """
    drafter = kind.skeleton(found.config)
    tensors = {
        name: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
        for name, tensor in found.tensors.items()
    }
    try:
        drafter.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise IncompatibleDrafter(f"the checkpoint does not fill {kind.__name__}: {error}") from error
    empty = [name for name, tensor in [*drafter.named_parameters(), *drafter.named_buffers()] if tensor.is_meta]
    if empty and device.type != "meta":
        raise IncompatibleDrafter(f"{kind.__name__} has tensors that no checkpoint holds: {', '.join(empty)}.")
    drafter.config.dtype = dtype
    return drafter.eval()


def borrow_embedding(found: Checkpoint, weight: Tensor) -> Checkpoint:
    """Leave a checkpoint's own embedding out where it is the target's, so that it is not held twice."""
    own = found.tensors.get(_EMBEDDING)
    if own is None or not same_rows(own, weight.detach()):
        return found
    config = copy.deepcopy(found.config)
    config.own_embedding = False
    tensors = {name: tensor for name, tensor in found.tensors.items() if name != _EMBEDDING}
    notes = [note for note in found.notes if not note.startswith("embedding:")]
    notes.append("embedding: the target's, which the checkpoint's own one equals")
    return replace(found, config=config, tensors=tensors, notes=tuple(notes))


def same_rows(own: Tensor, weight: Tensor) -> bool:
    """Tell whether two embeddings are equal once the finer one is rounded to the other's dtype."""
    if own.shape != weight.shape or not holds_numbers(weight):
        return False
    for start in range(0, len(own), _ROWS):
        left = own[start : start + _ROWS]
        right = weight[start : start + _ROWS].to(own.device)
        if not (torch.equal(left.to(right.dtype), right) or torch.equal(left, right.to(left.dtype))):
            return False
    return True


def dtype_named(dtype: torch.dtype | str | None, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return a floating dtype; None or ``auto``: the tensors' own. Raises: ``SpecGenError`` for other names."""
    if dtype is None or dtype == "auto":
        return next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    found = vars(torch).get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SpecGenError(f"dtype={dtype!r}: a floating dtype of torch is required, such as torch.bfloat16.")
    return found


def check_drafts(config: DrafterConfig) -> None:
    """Check how a drafter is told to draft. Raises: ``SpecGenError`` for a ``tree`` or ``num_tokens`` that is none."""
    with torch.device("cpu"):  # a drafter may be built without memory
        parse_shape(config.tree, StaticShape.chain(1), config.deepest)
    number: object = config.num_tokens
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise SpecGenError(
            f"num_tokens={number!r} in a drafter's config: a whole number of at least 1 is required, or None (as many "
            "as pay)."
        )


def check_fit(config: DrafterConfig, facts: TargetFacts) -> None:
    """Compare the sizes a drafter was made for with a target's. Raises: ``IncompatibleDrafter`` for others."""
    name = facts.name or "the target"
    own = trained_for(config)
    wanted = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    for size, need in wanted.items():
        have = facts.to_dict()[size]
        if need and have != need:  # 0: the files do not say
            raise IncompatibleDrafter(
                f"the drafter was made for a target of {size} {need} and {name} has {have}: they do not fit. Load "
                f"the target it was trained for{own}, or another drafter."
            )
    deepest = max(config.aux_layer_boundaries, default=0)
    if facts.num_layers and deepest > facts.num_layers:
        raise IncompatibleDrafter(
            f"the drafter reads the stream after layer {deepest} and {name} has {facts.num_layers} layers: they "
            f"do not fit. Load the target it was trained for{own}."
        )


def trained_for(config: DrafterConfig) -> str:
    """Return the name of the target that a drafter was made for, in brackets, if it is known."""
    name = config.target.get("name")
    return f" ({name})" if name else ""
