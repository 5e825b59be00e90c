"""What a model card tells of other programs that serve a drafter: the commands, after a conversion where one is needed.

The commands follow the programs' documentation; docs/progress.md says which were run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.opening import Report

Server = dict[str, Any]
_NOT_RUN = "Follows the documentation of {0}; the program that wrote this card did not run it."


def eagle_servers(report: Report, name: str, model: str) -> list[Server]:
    """Return how to serve an EAGLE-1 drafter of a target: converted to its authors' layout."""
    config = report.config
    if config.reduces_vocabulary:
        return []  # no other layout can say which rows of the target's head are read
    place, before = _place(name, False, "eagle")
    vllm = _vllm_lines(before, model, config, place)
    sglang = _sglang_lines(before, model, config, place)
    return _tools([("vLLM", vllm, not config.dropped_by_vllm), ("SGLang", sglang, True)])


def eagle3_servers(report: Report, name: str, model: str) -> list[Server]:
    """Return how to serve an EAGLE-3 drafter of a target: as it lies there where that is read, else converted first."""
    config = report.config
    if config.reduces_vocabulary and not config.own_head:
        return []  # no other layout can say it
    ours = report.layout == "specgen"
    first = config.aux_layer_boundaries[:1]
    # the default layout is the one that may leave the head to the target
    place, before = _place(name, ours, "vllm-speculators" if config.own_head else "specgen")
    vllm = _vllm_lines(before, model, config, place)
    # SGLang adds one to the layer ids if, and only if, the first is 1: the boundary 1 cannot be told
    place, before = _place(name, ours and first == [2], "sglang-eagle3")
    sglang = _sglang_lines(before, model, config, place)
    said = first != [1] and not config.fc_bias
    return _tools([("vLLM", vllm, not config.dropped_by_vllm), ("SGLang", sglang, said)])


def medusa_servers(report: Report, name: str, model: str) -> list[Server]:
    """Return how to serve heads over all ids; TGI knows no others, and vLLM 0.32.0 documents them and loads none."""
    config = report.config
    if config.reduces_vocabulary:
        return []
    lent = "" if config.own_head else f" --target {model}"
    place, before = _place(name, False, f"medusa-vllm{lent}")
    vllm = _vllm_lines(before, model, config, place, config.num_heads)
    tgi = [f"hf-specgen convert {name} out --to medusa{lent}", f"text-generation-launcher --model-id {model} ..."]
    return _tools([("Text Generation Inference", tgi, True), ("vLLM", vllm, True)])


def _tools(found: Iterable[tuple[str, list[str], bool]]) -> list[Server]:
    """Return what the template shows of the programs that serve the drafter."""
    return [{"name": title, "text": _NOT_RUN.format(title), "lines": lines} for title, lines, serves in found if serves]


def _vllm_lines(before: list[str], model: str, config: DrafterConfig, place: str, tokens: int = 0) -> list[str]:
    number = tokens or config.num_tokens or 3
    settings = f"""{{"method": "{config.method}", "model": "{place}", "num_speculative_tokens": {number}}}"""
    return [*before, f"vllm serve {model} --speculative-config \\", f"  '{settings}'"]


def _sglang_lines(before: list[str], model: str, config: DrafterConfig, place: str) -> list[str]:
    tokens = config.num_tokens or 3
    return [
        *before,
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm {config.method.upper()} \\",
        f"  --speculative-draft-model-path {place} --speculative-num-steps {tokens} --speculative-eagle-topk 1 \\",
        f"  --speculative-num-draft-tokens {tokens + 1}",
    ]


def _place(name: str, as_it_is: bool, layout: str) -> tuple[str, list[str]]:
    """Return what a server is pointed at, and the command before it."""
    return (name, []) if as_it_is else ("out", [f"hf-specgen convert {name} out --to {layout}"])
