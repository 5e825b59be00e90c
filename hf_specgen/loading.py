"""Load a drafter of any known layout, say what was found, and settle what its layer ids mean."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specgen.checkpoints.formats.base import ReadOptions
from hf_specgen.checkpoints.formats.layer_ids import CONVENTIONS
from hf_specgen.checkpoints.methods import method_named
from hf_specgen.checkpoints.opening import Opened, Report, open_checkpoint
from hf_specgen.drafting.features import FeatureDrafter
from hf_specgen.drafting.learned import LearnedDrafter, check_fit
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.models.facts import TargetFacts
from hf_specgen.models.taps import FINAL, Taps
from hf_specgen.models.wrappers import bare, driven

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerAgreement:
    """Hold how often a drafter's first guess is the target's best token under each reading of its layer ids.

    Shares of ``positions`` positions; None where the target has no such layers.
    """

    boundary: float | None
    layer_output: float | None
    positions: int

    @property
    def better(self) -> str:
        """Return the reading with the higher agreement, as ``aux_layer_convention=`` takes it."""
        return CONVENTIONS[(self.boundary or 0.0) < (self.layer_output or 0.0)]


def load_drafter(
    name: str | Path,
    target: nn.Module | None = None,
    *,
    aux_layer_convention: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    **settings: Any,
) -> LearnedDrafter:
    """Load the drafter in a folder or Hub repository, whatever layout it is in; no code of it is executed.

    ``target``: checked against the drafter before anything is read; dtype and device are then the target's, and an
    embedding that equals the target's is not held twice. ``aux_layer_convention``: ``boundary`` or ``layer_output``,
    where the checkpoint's layer ids are not meant as its producer means them (see ``calibrate_aux_layers``).
    ``settings``: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, and fields of ``DrafterConfig`` that
    replace the checkpoint's.

    Returns: the drafter; ``drafter.report`` says what was found and decided.
    Raises: ``SpecGenError`` when it cannot be opened; ``IncompatibleDrafter`` when tensors are missing or unknown,
    when it is no drafter, or when it does not fit the target.
    """
    model = bare(target) if target is not None else None
    facts = TargetFacts.of(model) if model is not None else TargetFacts()
    opened = open_checkpoint(name, ReadOptions(facts, aux_layer_convention), settings)
    kind = drafter_class(opened.config.method)
    drafter = kind.load(opened, model, dtype, device)
    _LOG.info("loaded %s", drafter.report)
    for text in drafter.report.warnings if drafter.report else ():
        warnings.warn(f"{name}: {text}", stacklevel=2)
    return drafter


def describe(
    name: str | Path, target: TargetFacts | None = None, *, aux_layer_convention: str | None = None, **settings: Any
) -> Report:
    """Say what ``load_drafter`` would load, without reading weights. Raises: as ``load_drafter`` does."""
    facts = target or TargetFacts()
    opened = open_checkpoint(name, ReadOptions(facts, aux_layer_convention), settings)
    if target is not None:
        check_fit(opened.config, facts)
    return checked(opened)


def checked(opened: Opened) -> Report:
    """Build the drafter of an opened checkpoint without memory, so that what its class refuses is refused now."""
    method_named(opened.config.method).drafter.skeleton(opened.config)
    return opened.report


def drafter_class(method: str) -> type[LearnedDrafter]:
    """Return the class that drafts with a method. Raises: ``IncompatibleDrafter`` for a method that is not known."""
    kind: type[LearnedDrafter] = method_named(method).drafter
    return kind


def calibrate_aux_layers(source: str | Path, target: nn.Module, ids: Tensor, **settings: Any) -> LayerAgreement:
    """Find out which layers an EAGLE-3 checkpoint means, by how often it then agrees with the target on a text.

    The text is given (teacher-forced): at every position the drafter's first guess is compared with the target's best
    token. Some hundred tokens of a text that the target itself wrote tell the readings apart.

    Shapes: ``ids (B, L)`` rows of equal length without padding, L at least 3.
    Raises: ``SpecGenError`` when both readings are the same; ``IncompatibleDrafter`` as ``load_drafter`` does.
    """
    if ids.dim() != 2 or ids.shape[1] < 3:
        raise SpecGenError(f"ids of shape {tuple(ids.shape)}: (rows, tokens) with at least 3 tokens is required.")
    model = driven(target)
    shares: dict[str, float] = {}
    seen: list[list[int]] = []
    refusal: IncompatibleDrafter | None = None
    for convention in CONVENTIONS:
        try:
            drafter = _quietly(source, model, convention, settings)
        except IncompatibleDrafter as error:
            refusal = error
            continue
        seen.append(drafter.config.aux_layer_boundaries)
        shares[convention] = first_agreement(drafter, model, ids)
    if refusal is not None and not shares:
        raise refusal
    if len(seen) == 2 and seen[0] == seen[1]:
        raise SpecGenError(
            f"{source} reads the boundaries {seen[0]} whichever way its ids are meant: there is nothing to choose."
        )
    boundary, layer_output = map(shares.get, CONVENTIONS)
    return LayerAgreement(boundary, layer_output, ids.shape[0] * (ids.shape[1] - 1))


def _quietly(source: str | Path, target: PreTrainedModel, convention: str, settings: dict[str, Any]) -> FeatureDrafter:
    """Load under one reading; what is in doubt is being measured, so nothing is said about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drafter = load_drafter(source, target, aux_layer_convention=convention, **settings)
    if not isinstance(drafter, FeatureDrafter) or FINAL in drafter.hidden_layers:
        raise SpecGenError(f"{source} holds a {drafter.config.method} drafter: it reads no layers by id.")
    return drafter


@torch.no_grad()
def first_agreement(drafter: FeatureDrafter, target: PreTrainedModel, ids: Tensor) -> float:
    """Return how often the drafter's first guess is the target's best token on given texts ``ids (B, L)``."""
    device = drafter.parts.device
    ids = ids.to(device)
    taps = Taps(target, drafter.hidden_layers)
    with taps.on() as seen:
        best = target(ids).logits.argmax(-1).to(device)
        hidden = taps.read(seen, device)
    features = drafter.fuse(tuple(layer[:, :-1] for layer in hidden))
    places = torch.arange(ids.shape[1] - 1, device=device)
    back = places[:, None] - places[None]
    sees = {kind: (back >= 0) & (back < (window or len(places))) for kind, window in drafter.config.windows.items()}
    masks = {kind: mask[None, None] for kind, mask in sees.items()}
    states = drafter.step(drafter.embed(ids[:, 1:]), features, places[None], masks, None)
    guesses = drafter.to_target(drafter.logits(states).argmax(-1))
    return float((guesses == best[:, 1:]).float().mean())
