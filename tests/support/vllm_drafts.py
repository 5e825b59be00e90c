"""Draft with vLLM on a CPU, in a process of its own: ``python vllm_drafts.py PLAN.json OUT.json``.

PLAN: target, prompts, tokens to write, and cases (name, folder, method, tokens of a draft). OUT, written after every
case: texts and the drafted ids of every round, or why vLLM refused.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where what is proposed can be watched
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
PROPOSERS = ("llm_base_proposer", "medusa")


def watch(drafts: list[Any]) -> None:
    """Keep what every class that proposes returns."""
    for name in PROPOSERS:
        module = import_module(f"vllm.v1.spec_decode.{name}")
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and "propose" in vars(kind):
                kind.propose = kept(kind.propose, drafts)


def kept(propose: Any, drafts: list[Any]) -> Any:
    """Return a method that does the same and keeps the ids of the first row."""

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = propose(self, *args, **kwargs)
        tokens = result[0] if isinstance(result, tuple) else result
        drafts.append(tokens[0].tolist())
        return result

    return watched


def run(plan: dict[str, Any], case: dict[str, Any], drafts: list[Any]) -> dict[str, Any]:
    """Write every prompt's text with one drafter."""
    from vllm import LLM, SamplingParams

    model = LLM(
        plan["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=2,
        enforce_eager=True,
        seed=0,
        kv_cache_memory_bytes=1 << 26,
        enable_prefix_caching=False,
        speculative_config={
            "method": case["method"],
            "model": case["folder"],
            "num_speculative_tokens": case["tokens"],
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=plan["max_tokens"], ignore_eos=True, detokenize=False)
    found: dict[str, Any] = {"texts": [], "drafts": []}
    for prompt in plan["prompts"]:
        drafts.clear()
        (answer,) = model.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        found["texts"].append(list(answer.outputs[0].token_ids))
        found["drafts"].append(list(drafts))
    return found


def main(plan_file: str, out_file: str) -> None:
    """Run every case of a plan."""
    os.environ.update(QUIET)
    from vllm.distributed import cleanup_dist_env_and_memory

    plan = json.loads(Path(plan_file).read_text())
    found: dict[str, Any] = {}
    drafts: list[Any] = []
    watch(drafts)
    for case in plan["cases"]:
        try:
            found[case["name"]] = run(plan, case, drafts)
        except Exception as error:
            found[case["name"]] = {"refused": f"{type(error).__name__}: {error}"}
        cleanup_dist_env_and_memory()
        Path(out_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
