"""Medusa v1.0 (Medusa-2): a whole fine-tuned model with its heads in one checkpoint."""

from __future__ import annotations

from dataclasses import replace

from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.medusa_common import Heads, plan_heads
from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.models.facts import fingerprint_of

_PREFIX = "medusa_head."
_BACKBONE = ("model.", "lm_head.")
_EMBEDDING = "model.embed_tokens.weight"


class MedusaModel(Layout):
    """Read the heads ``medusa_head.*`` and take the fingerprint of the backbone they were trained with.

    The backbone differs from the published base model, so heads and backbone belong together: the drafter refuses
    every other target. ``AutoModelForCausalLM.from_pretrained`` of the same checkpoint is the target.
    """

    name = "medusa-model"
    order = 50

    def matches(self, source: Source) -> bool:
        """Tell by names: heads beside decoder layers."""
        return Heads.find(source, _PREFIX).count > 0 and any(name.startswith("model.layers.") for name in source.shapes)

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Leave the backbone out; anything that is neither heads nor backbone is unknown."""
        plan = plan_heads(source, options, _PREFIX, _BACKBONE)
        if _EMBEDDING not in source.shapes:
            raise IncompatibleDrafter(
                f"{source.name} lacks the tensor {_EMBEDDING}: the backbone that these heads were trained with cannot "
                "be told. A complete Medusa-2 checkpoint is required."
            )
        layers = {name.split(".")[2] for name in source.shapes if name.startswith("model.layers.")}
        own = {"name": source.name, "num_layers": len(layers), "own_backbone": True}
        plan.config.target = {**plan.config.target, **own}
        return replace(plan, notes=(*plan.notes, "the target is the backbone of this checkpoint, and no other"))

    def read(self, source: Source, options: ReadOptions) -> Checkpoint:
        """Read the heads, and of the backbone what its fingerprint and the marks of some layers are made of."""
        checkpoint = super().read(source, options)
        wanted = [name for name in (_EMBEDDING, "lm_head.weight") if name in source.shapes]
        loaded = source.load(wanted)
        mark = fingerprint_of(loaded[_EMBEDDING], loaded[wanted[-1]])
        layers = {name: fingerprint_of(*2 * [source.load([name])[name]]) for name in marked(source)}
        checkpoint.config.target = {**checkpoint.config.target, "fingerprint": mark, "layers": layers}
        return checkpoint


def marked(source: Source) -> list[str]:
    """Return weights that fine-tuning changes, of the first, the middle and the last layer: adapters spare some."""
    numbers = sorted({int(name.split(".")[2]) for name in source.shapes if name.startswith("model.layers.")})
    chosen = sorted({numbers[0], numbers[len(numbers) // 2], numbers[-1]})
    parts = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    names = [f"model.layers.{number}.{part}.weight" for number in chosen for part in parts]
    return [name for name in names if name in source.shapes]


LAYOUT = MedusaModel()
