"""What the Medusa layouts share: heads are counted by their tensors, because configs are often wrong about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.shared import floats_only, match, refuse_unreadable

KEY = "hf_specgen"
"""Where the settings of ours stand in a config that others read."""

_NAME = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_KEPT = ("tree", "num_tokens", "sample", "target")


@dataclass(frozen=True)
class Heads:
    """Hold what tensor names say: how many heads, how deep, and whose language-model head they end in.

    ``names`` maps ``{head}.{block}.linear.weight`` and ``{head}.{blocks}.weight``, as the drafter calls them, to the
    file's names.
    """

    names: Mapping[str, str]

    @classmethod
    def find(cls, source: Source, prefix: str = "") -> Heads:
        """Find the heads under a prefix."""
        short = {name.removeprefix(prefix): name for name in source.shapes if name.startswith(prefix)}
        return cls({name: full for name, full in short.items() if _NAME.fullmatch(name)})

    @property
    def count(self) -> int:
        """Return the number of heads."""
        return 1 + max((int(name.split(".")[0]) for name in self.names), default=-1)

    @property
    def blocks(self) -> int:
        """Return the number of residual blocks of a head."""
        return 1 + max((int(name.split(".")[1]) for name in self.names if ".linear." in name), default=-1)

    @property
    def own(self) -> bool:
        """Tell whether they end in language-model heads of their own."""
        return any(".linear." not in name for name in self.names)

    @property
    def bias(self) -> bool:
        """Tell whether the residual blocks have biases."""
        return any(name.endswith(".bias") for name in self.names)

    def last(self, source: Source) -> tuple[int, ...]:
        """Return the shape of the first head's last matrix: ``(vocabulary, hidden)``, or ``(hidden, hidden)``."""
        blocks = self.blocks
        name = f"0.{blocks}.weight" if self.own else f"0.{blocks - 1}.linear.weight"
        shape = source.shapes.get(self.names.get(name, ""), (0, 0))
        return shape if len(shape) == 2 else (0, 0)

    def config(self, hidden: int, vocab: int, draft_vocab: int = 0, **settings: Any) -> DrafterConfig:
        """Return the drafter's configuration."""
        sizes = {"hidden_size": hidden, "vocab_size": vocab}
        return DrafterConfig(
            "medusa",
            draft_vocab_size=draft_vocab or vocab,
            num_heads=self.count,
            num_head_layers=self.blocks,
            head_bias=self.bias or not self.blocks,
            own_head=self.own,
            **{**sizes, **settings, "target": sizes | settings.get("target", {})},
        )

    def notes(self, source: Source, vocab: int) -> tuple[str, ...]:
        """Say what was found, and where the config is overruled."""
        whose = f"own language-model heads over {vocab} ids" if self.own else "the target's language-model head"
        found = [f"{self.count} Medusa heads of {self.blocks} residual block(s), {whose}; no token embedding is used"]
        for key, have in (("medusa_num_heads", self.count), ("medusa_num_layers", self.blocks)):
            said = source.config.get(key)
            if said is not None and said != have:
                found.append(f"config says {key}={said}, the tensors say {have}: the tensors count")
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Say what may cost acceptance."""
        if not self.blocks or self.bias:
            return ()
        return ("the residual blocks have no biases: a conversion for vLLM drops them, and acceptance with them.",)


def plan_heads(source: Source, options: ReadOptions, prefix: str = "", backbone: tuple[str, ...] = ()) -> Plan:
    """Resolve the heads under a prefix; names that begin with one of ``backbone`` are another model's and left out.

    Raises: ``IncompatibleDrafter`` naming tensors that are missing, unknown or of the wrong shape.
    """
    refused = refuse_unreadable(source, {})
    heads = Heads.find(source, prefix)
    rows, hidden = heads.last(source)
    vocab = rows if heads.own else options.target.vocab_size or int(source.config.get("vocab_size") or 0)
    config = heads.config(hidden, vocab, **settings_kept(source))
    others = {name: name for name in source.shapes if name not in heads.names.values()}
    left_out = frozenset(name for name in others if backbone and name.startswith(backbone))
    names = match(source, {**others, **heads.names}, config, dropped=left_out, spoken=lambda name: prefix + name)
    return Plan(config, names, heads.notes(source, vocab), (*heads.warnings, *refused), checked(source))


def checked(source: Source) -> Any:
    """Return the check of tensors that were read: plain floats."""

    def finish(found: Checkpoint) -> Checkpoint:
        floats_only(source.name, found.tensors)
        return replace(found, tensors=dict(found.tensors))

    return finish


def kept_settings(config: DrafterConfig) -> dict[str, Any]:
    """Return the settings of ours that ``plan_heads`` reads back."""
    fields = config.to_dict()
    return {name: fields[name] for name in _KEPT if fields[name]}


def settings_kept(source: Source) -> dict[str, Any]:
    """Return the settings of ours that a file keeps, and the target's name."""
    found = source.config.get(KEY) or {}
    kept = {name: found[name] for name in _KEPT if found.get(name)}
    return {**kept, "target": {"name": base_model(source), **kept.get("target", {})}}


def served_settings(config: DrafterConfig, vocab: int) -> dict[str, Any]:
    """Return what vLLM must be told of heads in any layout; without ``medusa_fc_bias`` it drops their biases."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": config.target.get("name", ""),
        "hidden_size": config.hidden_size,
        "vocab_size": vocab,
        "transformers_version": transformers.__version__,
    }


def base_model(source: Source) -> str:
    """Return the target's name as the config tells it."""
    name = str(source.config.get("base_model_name_or_path") or "")
    return "" if name == "N/A" else name
