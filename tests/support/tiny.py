"""Tiny random models of every supported family, and drafters that only tests need."""

from __future__ import annotations

import copy
import random
import string
from collections.abc import Collection, Iterable
from itertools import combinations, product

import pytest
import torch
import transformers
from transformers import AutoConfig, PreTrainedModel

from hf_specgen import (
    Call,
    Draft,
    Drafter,
    LearnedDrafter,
    PromptLookup,
    Reads,
    Round,
    Session,
    SmallModel,
    SpeculativeDecoding,
    Tree,
)
from hf_specgen.drafting.drafter import TargetView

COMMON = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
    initializer_range=0.3,
)
MIXED = ["sliding_attention", "full_attention"]
# family: (model class, settings beyond COMMON, attention implementations that exist for it)
FAMILIES: dict[str, tuple[str, dict, tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", {}, ("sdpa", "eager")),
    "qwen2": ("Qwen2ForCausalLM", {}, ("sdpa", "eager")),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}, ("sdpa", "eager")),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}, ("sdpa", "eager")),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": MIXED},
        ("eager",),
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": MIXED},
        ("sdpa", "eager"),
    ),
    "phi3": ("Phi3ForCausalLM", {}, ("sdpa", "eager")),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
        },
        ("sdpa", "eager"),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED},
        ("eager",),
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}, ("sdpa", "eager")),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        ("sdpa", "eager"),
    ),
    "olmo2": ("Olmo2ForCausalLM", {}, ("sdpa", "eager")),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"sliding_window": 8, "layer_types": MIXED, "logit_scale": 1.0},
        ("sdpa", "eager"),
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, ("sdpa", "eager")),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        ("sdpa", "eager"),
    ),
}
CASES = [(family, impl) for family, (_, _, impls) in FAMILIES.items() for impl in impls]


def build(family: str, implementation: str = "sdpa", seed: int = 0, **settings: object) -> PreTrainedModel:
    """Build a tiny random model of a family in float32, ready to generate without EOS."""
    torch.manual_seed(seed)
    class_name, extra, _ = FAMILIES[family]
    config = AutoConfig.for_model(family, **{**COMMON, **extra, **settings})
    config._attn_implementation = implementation
    model = getattr(transformers, class_name)._from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    model.generation_config.bos_token_id = None
    return model


def tiny(seed: int = 0, vocab: int = 64, layers: int = 2, **settings: object) -> PreTrainedModel:
    """Build the Llama of user_cases.md (T)."""
    return build("llama", seed=seed, vocab_size=vocab, num_hidden_layers=layers, **settings)


def disturbed(model: PreTrainedModel, scale: float = 0.05) -> PreTrainedModel:
    """Copy a model with noise on every weight (D+): agrees often, not always."""
    copied = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter += scale * parameter.std() * torch.randn_like(parameter)
    return copied


def prompts(lengths: list[int], seed: int = 3, vocab: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random left-padded prompts and their mask; each repeats itself so that lookup finds something."""
    torch.manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        text = torch.randint(1, vocab, (length,))
        text[length // 2 :] = text[: length - length // 2].clone()
        ids[row, width - length :] = text
        mask[row, width - length :] = 1
    return ids, mask


class Handmade(Drafter):
    """A drafter for one call at a time that keeps its state on itself; a test overrides what happens when."""

    hidden_layers: tuple[int, ...] = ()

    def reads(self, model) -> Reads:
        return Reads(hidden=self.hidden_layers)

    def begin(self, call: Call) -> Session:
        self.call = call
        self.room: list[int] = []
        self.on_begin(call.sequences)
        return HandmadeSession(self)

    def on_begin(self, sequences) -> None: ...

    def on_propose(self, sequences) -> Draft:
        raise NotImplementedError

    def on_observe(self, round: Round) -> None: ...


class HandmadeSession(Session):
    """Hand every event of a call to the drafter itself."""

    def __init__(self, drafter: Handmade) -> None:
        self.drafter = drafter

    @property
    def draft_cost(self) -> float:
        return vars(self.drafter)["session"].draft_cost if "session" in vars(self.drafter) else 0.0

    def propose(self, room: list[int]) -> Draft:
        self.drafter.room = room
        return self.drafter.on_propose(self.drafter.call.sequences)

    def observe(self, round: Round) -> None:
        self.drafter.on_observe(round)


def begun(drafter: Drafter, sequences) -> Session:
    """Begin a drafter that needs nothing of its target."""
    return drafter.begin(Call(sequences, TargetView(None)))


class RandomTree(Handmade):
    """Draft random trees, another shape in every row and round, that often contain the given continuation."""

    def __init__(
        self, texts: list[list[int]], hit: float = 0.75, nodes: int = 7, seed: int = 0, vocab: int = 64
    ) -> None:
        self.texts, self.hit, self.nodes, self.seed, self.vocab = texts, hit, nodes, seed, vocab

    def on_begin(self, sequences) -> None:
        self.random = random.Random(self.seed)
        self.accepted_off_spine = 0

    def on_propose(self, sequences) -> Draft:
        known = zip(self.texts, sequences.tokens, self.room, strict=True)
        rows = [self._row(text, tokens, room) for text, tokens, room in known]
        width = max(len(tokens) for tokens, _ in rows)
        device = sequences.prompt.device
        parents = [above + [-1] * (width - len(above)) for _, above in rows]
        block = Draft.from_lists([tokens for tokens, _ in rows], device)
        return Draft(block.tokens, Tree(torch.tensor(parents, device=device).view(len(rows), width)), block.n_valid)

    def _row(self, text: list[int], tokens: list[int], room: int) -> tuple[list[int], list[int]]:
        draft, parents, depths, right = [], [], [], []
        for _ in range(self.random.randint(0, self.nodes)):
            parent = self.random.randint(-1, len(draft) - 1)
            depth = 0 if parent < 0 else depths[parent] + 1
            place = len(tokens) + depth
            if depth >= room or place >= len(text):
                continue
            follows = parent < 0 or right[parent]
            hit = follows and self.random.random() < self.hit
            draft.append(text[place] if hit else self.random.randrange(1, self.vocab))
            parents.append(parent)
            depths.append(depth)
            right.append(follows and draft[-1] == text[place])
        return draft, parents

    def on_observe(self, round: Round) -> None:
        self.accepted_off_spine += sum(path != list(range(len(path))) for path in round.paths)


class Watch(Handmade):
    """Pass another drafter through and keep what happened, so that a test can assert which path ran."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner

    def reads(self, model) -> Reads:
        return self.inner.reads(model)

    def on_begin(self, sequences) -> None:
        self.rounds: list[Round] = []
        if isinstance(self.inner, LearnedDrafter):  # tests compute with it afterwards
            self.inner.attach(self.call.target.model)
        self.session = self.inner.begin(self.call)

    def on_propose(self, sequences) -> Draft:
        return self.session.propose(self.room)

    def on_observe(self, round: Round) -> None:
        self.rounds.append(round)
        self.session.observe(round)

    @property
    def longest(self) -> int:
        """Return the longest accepted path of any row and round."""
        return max((len(path) for round in self.rounds for path in round.paths), default=0)

    @property
    def off_spine(self) -> int:
        """Count accepted paths that are not a draft's first nodes: only a tree has them."""
        return sum(path != list(range(len(path))) for round in self.rounds for path in round.paths)

    @property
    def width(self) -> int:
        """Return the widest draft."""
        return max((round.draft.width for round in self.rounds), default=0)

    @property
    def drafted(self) -> set[int]:
        """Return every proposed token."""
        found: set[int] = set()
        for round in self.rounds:
            for tokens, count in zip(round.draft.tokens.tolist(), round.proposed, strict=True):
                found.update(tokens[:count])
        return found


def texts_of(output: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Return each row of a plain result without its left padding."""
    pads = mask.shape[1] - mask.sum(1)
    return [row[pad:] for row, pad in zip(output.tolist(), pads.tolist(), strict=True)]


def garbled(text: list[int], period: int = 7, vocab: int = 64) -> list[int]:
    """Replace every ``period``-th token: a draft copied from it is right for a while, then wrong."""
    return [token % (vocab - 1) + 1 if place % period == period - 1 else token for place, token in enumerate(text)]


# kind: how a drafter with trained weights, see fitted.py, is asked to draft ``tokens`` tokens in a row
LEARNED: dict[str, tuple[str, str, dict[str, object]]] = {
    "medusa": ("medusa", "static", {"num_head_layers": 1}),
    "eagle": ("eagle", "chain", {}),
    "eagle dynamic": ("eagle", "dynamic", {"fc_bias": True, "sliding_window": 8}),
    "eagle3": ("eagle3", "static", {"reduced": True}),
}
KINDS = ("lookup", "branches", "small", "sampled", "tree", *LEARNED)
TREES = ("branches", "tree", "medusa", "eagle dynamic", "eagle3")


def with_learned(kinds: Iterable[str]) -> list[object]:
    """Add the learned kinds to a suite's; one of them runs every time."""
    others = [kind for kind in LEARNED if kind != "eagle dynamic"]
    return [*kinds, "eagle dynamic", *(pytest.param(kind, marks=pytest.mark.slow) for kind in others)]


def some(*axes: Collection[object], fast: Iterable[tuple[object, ...]] = ()) -> list[object]:
    """Pair everything with everything; what adds nothing new to the fast cases is slow.

    Of two axes every option is fast once, of three or more every two options that can meet; so are the cases named.
    """
    cases = list(product(*axes))
    meeting = max(1, min(2, len(axes) - 1))

    def met(case: tuple[object, ...]) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations([(place, repr(option)) for place, option in enumerate(case)], meeting))

    chosen = list(fast)
    left = set().union(*map(met, cases)) - set().union(*map(met, chosen))
    while left:
        chosen.append(max(cases, key=lambda case: len(met(case) & left)))
        left -= met(chosen[-1])
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def few(cases: Iterable[object], *fast: object) -> list[object]:
    """Mark every case slow but those named; a name that no case has is an error."""
    listed = list(cases)
    if strangers := [case for case in fast if case not in listed]:
        raise ValueError(f"no such cases: {strangers}")

    def slow(case: object) -> object:
        return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)

    return [case if case in fast else slow(case) for case in listed]


def drafter_of(kind: str, model: PreTrainedModel, texts: list[list[int]], tokens: int = 4) -> Watch:
    """Build a drafter that is right often and wrong often; ``texts`` are the rows it will meet.

    The lookups search texts of which every fifth token is wrong; the wrong continuation is the newer one, so a tree's
    right branch is the second.
    """
    if kind in LEARNED:
        return Watch(learned(kind, model, texts, tokens))
    vocab = model.config.vocab_size
    if kind in ("small", "sampled"):
        return Watch(SmallModel(disturbed(model), tokens, sample=kind == "sampled"))
    if kind == "tree":
        return Watch(RandomTree(texts, nodes=2 * tokens, vocab=vocab))
    if kind == "branches":
        corpus = [text + garbled(text, vocab=vocab) for text in texts]
        return Watch(PromptLookup(tokens, branches=2, corpus=corpus))
    return Watch(PromptLookup(tokens, corpus=[garbled(text, vocab=vocab) for text in texts]))


def learned(kind: str, model: PreTrainedModel, texts: list[list[int]], tokens: int) -> Drafter:
    """Build a drafter whose weights know the texts but for every third token; trees hold the right one second there."""
    from fitted import fitted

    method, shape, settings = LEARNED[kind]
    spine = [[0] * depth for depth in range(1, tokens + 1)]
    shapes: dict[str, dict[str, object]] = {
        "chain": {"tree": "chain", "num_tokens": tokens},
        "static": {
            "tree": [*spine, *([*path[:-1], 1] for path in spine[:2]), *([[1, 0], [1, 1]] if tokens > 1 else [])]
        },
        "dynamic": {"tree": {"top_k": 2, "depth": tokens, "nodes": 2 * tokens}},
    }
    heads = {"num_heads": tokens} if method == "medusa" else {}
    return fitted(method, model, texts, 3, **settings, **heads, **shapes[shape])


def assert_ran(watch: Watch, kind: str) -> None:
    """Fail when the run proves nothing: no round accepted two tokens, or a tree was walked like a chain."""
    assert watch.longest >= 2, f"{kind}: no round accepted two drafted tokens"
    if kind in TREES:
        assert watch.off_spine > 0, f"{kind}: no accepted path left the spine"
        assert any(not round.draft.tree.is_chain for round in watch.rounds)


def plain(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None, **settings: object):
    """Run the untouched ``generate()``, greedy and 32 tokens unless told otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    asked = {"do_sample": False, "max_new_tokens": 32, **settings}
    if "max_length" in asked:
        asked.pop("max_new_tokens")
    return model.generate(ids, attention_mask=mask, **asked)


def ours(
    model: PreTrainedModel,
    drafter: Drafter | None,
    ids: torch.Tensor,
    mask: torch.Tensor | None = None,
    **settings: object,
):
    """Run the same call with a drafter, without enabling the model."""
    return plain(model, ids, mask, custom_generate=SpeculativeDecoding(drafter), **settings)


class Keep:
    """Stand in for a streamer and keep what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.puts = 0
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended, "a token after the end"
        self.puts += 1
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def unnoticed(hook):
    """Let a test's own hook pass for one of torch's: with hooks of the user's a tested model is tried too."""
    hook.__module__ = "torch"
    return hook


def letters(vocab: int = 64) -> transformers.PreTrainedTokenizerFast:
    """Build a tokenizer of one character a token."""
    from tokenizers import Tokenizer, decoders, models

    symbols = (string.ascii_letters + string.digits + "+/")[:vocab]
    core = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)
