"""Medusa "version 2" heads: residual blocks alone, before the target's own language-model head."""

from __future__ import annotations

from hf_specgen.checkpoints.formats.base import Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.medusa_common import Heads, plan_heads


class SharedHeads(Layout):
    """Read ``{head}.{layer}.linear.*``; the config's ``version`` is often missing, so names decide."""

    name = "medusa-shared-head"
    order = 61

    def matches(self, source: Source) -> bool:
        """Tell by names: residual blocks and nothing else."""
        heads = Heads.find(source)
        return heads.count > 0 and not heads.own

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Count the heads by their tensors."""
        copied = ("lm_head.",) if source.config.get("original_lm_head") else ()  # the target's, for vLLM
        return plan_heads(source, options, backbone=copied)


LAYOUT = SharedHeads()
