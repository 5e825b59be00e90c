"""Medusa v0.1 heads, each with a language-model head of its own (Cai et al. 2024); written for TGI too."""

from __future__ import annotations

import warnings as python_warnings
from pathlib import Path
from typing import Any

import torch

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.lent import HEAD
from hf_specgen.checkpoints.formats.medusa_common import KEY, Heads, kept_settings, plan_heads, served_settings
from hf_specgen.checkpoints.formats.shared import store
from hf_specgen.errors import IncompatibleDrafter


class MedusaHeads(Layout):
    """Read ``{head}.{layer}.linear.*`` and ``{head}.{layers}.weight``; write them, or heads without the latter."""

    name = "medusa"
    order = 60

    def matches(self, source: Source) -> bool:
        """Tell by names: residual blocks and heads, numbered from zero."""
        heads = Heads.find(source)
        return heads.count > 0 and heads.own

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Count the heads by their tensors; the config's number is wrong in the published files."""
        return plan_heads(source, options)

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write ``medusa_lm_head.safetensors`` and ``config.json``, which TGI and vLLM read.

        Medusa's own code opens ``medusa_lm_head.pt`` beside the same config, or a whole Medusa-2 model: it does not
        look for this file.
        Raises: ``IncompatibleDrafter`` for another method or a reduced vocabulary.
        """
        config = checkpoint.config
        if config.method != "medusa" or config.reduces_vocabulary:
            what = f"a {config.method} drafter" if config.method != "medusa" else "a reduced vocabulary (d2t)"
            raise IncompatibleDrafter(
                f"layout 'medusa' cannot hold {what}: Medusa heads over all ids are required. Layout 'medusa-vllm' "
                "holds heads over some."
            )
        tensors = dict(checkpoint.tensors)
        for name in [name for name in tensors if name.endswith("linear.weight") and not config.head_bias]:
            tensors[name.replace(".weight", ".bias")] = torch.zeros_like(tensors[name][0])  # readers want one
        head = None if config.own_head else checkpoint.lent.get(HEAD)
        settings: dict[str, Any] = {
            **served_settings(config, config.vocab_size or (0 if head is None else len(head))),
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_head_layers,
            "medusa_fc_bias": True,
            KEY: kept_settings(config),
        }
        if not config.own_head:
            settings["version"] = "2"
        if head is not None:  # vLLM's heads never read the target's
            tensors[HEAD] = head
            settings["original_lm_head"] = True
        elif not config.own_head:
            python_warnings.warn(
                "the heads end in the target's head and the file has none: TGI takes the target's, vLLM drafts "
                "noise. To write it too: hf-specgen convert --target TARGET.",
                stacklevel=2,
            )
        store(folder, settings, tensors, "medusa_lm_head.safetensors")

    def borrowed(self, config: DrafterConfig) -> tuple[str, ...]:
        """Return the target's head where the heads end in it: vLLM reads no other."""
        return () if config.own_head else (HEAD,)


LAYOUT = MedusaHeads()
