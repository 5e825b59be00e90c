"""The lossy rule: Medusa's typical acceptance, against an implementation of its own, and flagged as what it is."""

from __future__ import annotations

import math
import random
import warnings

import pytest
import torch
from law import enumerate_law, p_value
from tiny import (
    Handmade,
    Watch,
    assert_ran,
    build,
    disturbed,
    drafter_of,
    few,
    garbled,
    plain,
    prompts,
    some,
    texts_of,
    tiny,
)

from hf_specgen import PromptLookup, SmallModel, SpecGenError, SpeculativeDecoding, enable, ops, use_kernels
from hf_specgen.round.coins import Coins
from hf_specgen.round.records import DenseQ, Draft, Tree
from hf_specgen.round.typical import Typical, verify_typical
from hf_specgen.round.verify import verify
from hf_specgen.round.verify_dense import Dense

pytestmark = pytest.mark.filterwarnings("ignore:rule='typical:UserWarning")
LENGTHS = [5, 17, 11, 24]


class Medusa:
    """Typical acceptance the way Medusa's loop has it: padded candidate paths, one per leaf, all judged at once."""

    def __init__(self, parents: list[int], tokens: list[int]) -> None:
        leaves = [node for node in range(len(parents)) if node not in parents]
        lines = []
        for leaf in leaves or [-1]:
            line = []
            while leaf >= 0:
                line.insert(0, leaf)
                leaf = parents[leaf]
            lines.append(line)
        depth = max(map(len, lines))
        self.nodes = torch.tensor([[-1, *line] + [-2] * (depth - len(line)) for line in lines]) + 1  # root is 0
        self.tokens = torch.tensor([0, *tokens])

    def accept(self, logits: torch.Tensor, temperature: float, threshold: float, alpha: float) -> tuple[list[int], int]:
        """Return the accepted nodes of the best candidate and the place whose law comes next."""
        if self.nodes.shape[1] == 1:
            return [], 0
        judges, judged = self.nodes[:, :-1], self.nodes[:, 1:]
        law = torch.softmax(logits[judges.clamp(min=0)] / temperature, -1)
        chance = law.gather(-1, self.tokens[judged.clamp(min=0)].unsqueeze(-1)).squeeze(-1)
        entropy = -(law * torch.log(law + 1e-12)).sum(-1)
        limit = torch.minimum(torch.exp(-entropy) * alpha, torch.tensor(threshold))
        lengths = ((chance > limit) & (judged >= 0)).long().cumprod(1).sum(1)
        best = int(lengths.max())
        if best == 0:
            return [], 0
        longest = (lengths == best).nonzero().squeeze(1)
        likelihood = torch.log(chance[longest, :best]).sum(1)
        winner = judged[longest[likelihood.argmax()], :best]
        return (winner - 1).tolist(), int(winner[-1])


def rounds(seed: int, vocab: int = 50, nodes: int = 14):
    """Make a random tree whose tokens are often likely, siblings distinct, with every place's logits in float64."""
    chance = random.Random(seed)
    parents = [chance.randint(-1, node - 1) for node in range(nodes)]
    logits = torch.randn(nodes + 1, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.5
    ranked = logits.argsort(-1, descending=True)
    ranks = {parent: [*chance.sample(range(4), 4), *range(4, nodes)] for parent in range(-1, nodes)}
    tokens = [int(ranked[parent + 1, ranks[parent].pop(0)]) for parent in parents]
    return parents, tokens, logits


def coins(rows: int = 1) -> Coins:
    zeros = torch.zeros(rows, dtype=torch.long)
    return Coins(zeros + 7, torch.arange(rows), zeros + 20)


@pytest.mark.parametrize(
    ("threshold", "alpha", "greedy"),
    few(
        [(*pair, greedy) for pair in ((0.09, 0.3), (0.3, 0.09), (0.02, 0.6), (0.6, 2.0)) for greedy in (True, False)],
        *((0.09, 0.3, True), (0.3, 0.09, False), (0.02, 0.6, True), (0.6, 2.0, False)),
    ),
)
def test_vector_m_g(greedy: bool, threshold: float, alpha: float) -> None:
    """M-g: paths, lengths and the token after them equal Medusa's; of equally deep paths the likeliest wins."""
    ties, lengths = 0, set()
    for seed in range(60):
        parents, tokens, logits = rounds(seed)
        heat = 1.0 if greedy else 0.7
        draft = Draft(torch.tensor([tokens]), Tree(torch.tensor([parents])), torch.tensor([len(tokens)]))
        dense = Dense((logits / heat)[None].float(), temperature=0.0 if greedy else 1.0)
        with ops.record() as calls:
            verdict = verify_typical(dense, draft, None if greedy else coins(), Typical(threshold, alpha))
        assert calls["typical_tree", "reference"] == 1
        path, place = Medusa(parents, tokens).accept(logits, heat, threshold, alpha)
        assert verdict.path[0, : int(verdict.n)].tolist() == path
        assert not verdict.invalid.any()
        if greedy:
            assert int(verdict.next) == int(logits[place].argmax())
        else:
            coin = coins().uniform(torch.tensor([0]), len(path), ops.SAMPLE)
            assert int(verdict.next) == int(ops.draw(logits[place : place + 1] / heat, coin)[0])
        lengths.add(len(path))
        siblings = [node for node in range(len(parents)) if parents[node] == (path[-2] if len(path) > 1 else -1)]
        ties += bool(path) and path[-1] != min(siblings)
    assert len(lengths) >= 3 and max(lengths) >= 3 and ties


def test_values_at_the_limit_written_out() -> None:
    """Uniform over four: H = ln 4, so alpha = 0.3 asks for more than 0.075, and alpha = 1 for more than p itself."""
    draft = Draft(torch.tensor([[2]]), Tree.chain(1), torch.tensor([1]))
    dense = Dense(torch.zeros(1, 2, 4))
    accepted = [int(verify_typical(dense, draft, coins(), Typical(1.0, alpha)).n) for alpha in (0.3, 0.99, 1.01)]
    assert accepted == [1, 1, 0]
    peaked = Dense(torch.tensor([0.85, 0.05, 0.05, 0.05]).log().expand(1, 2, 4))  # H = 0.59, exp(-H) = 0.56
    limits = [(0.04, 0.3), (0.06, 0.3), (0.06, 0.08)]
    assert [int(verify_typical(peaked, draft, coins(), Typical(*limit)).n) for limit in limits] == [1, 0, 1]


@pytest.mark.parametrize("rule", ["rejection", "gumbel", Typical()])
def test_vector_m_h(rule: str | Typical) -> None:
    """M-h: behind a short leaf the best token is id 0, the number that fills the other places; none is accepted."""

    class Given:
        greedy, vocab_size, device, untouched = rule != "gumbel", 6, torch.device("cpu"), None

        def __init__(self, logits: torch.Tensor) -> None:
            self.logits = logits

        def at(self, rows: torch.Tensor, nodes: torch.Tensor) -> torch.Tensor:
            return self.logits[rows, nodes]

        def dense(self, folds: bool) -> Dense:
            return Dense(self.logits, temperature=0.0)

    draft = Draft.from_lists([[5], [1, 2, 3]])
    assert draft.tokens[0].tolist() == [5, 0, 0]
    logits = torch.zeros(2, 4, 6)
    for place, token in enumerate([5, 0, 0, 0]):
        logits[0, place, token] = 90.0
    for place, token in enumerate([1, 2, 3, 0]):
        logits[1, place, token] = 90.0
    verdict = verify(Given(logits), draft, coins(2), rule)
    assert (verdict.n.tolist(), verdict.next.tolist()) == ([1, 3], [0, 0])


def run(model, drafter, ids, mask=None, rule: str | Typical = "typical", **settings):
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5, "max_new_tokens": 24, **settings}
    return plain(model, ids, mask, custom_generate=SpeculativeDecoding(drafter, rule), **settings)


@pytest.mark.parametrize(("kind", "greedy"), some(("lookup", "branches", "small", "tree"), (True, False)))
def test_more_is_accepted_and_the_text_is_another(kind: str, greedy: bool) -> None:
    model = tiny()
    ids, mask = prompts(LENGTHS)
    settings = {"do_sample": not greedy, **({"temperature": None, "top_k": None} if greedy else {})}
    exact = run(model, None, ids, mask, "rejection", **settings)
    texts = texts_of(exact, mask)
    noisy = SmallModel(disturbed(model, 0.3), 4) if kind == "small" else None
    watches = [Watch(noisy) if noisy else drafter_of(kind, model, texts) for _ in range(2)]
    same = run(model, watches[0], ids, mask, "rejection", **settings)
    assert torch.equal(same, exact) and (same.speculation.rule, same.speculation.lossless) == ("rejection", True)
    changed = run(model, watches[1], ids, mask, Typical(0.02, 0.05), **settings)
    stats = changed.speculation
    assert not torch.equal(changed, exact)
    assert (stats.rule, stats.lossless) == ("typical(threshold=0.02, alpha=0.05)", False)
    assert stats.to_dict()["lossless"] is False and stats.to_dict()["rule"] == stats.rule
    if kind == "small":  # the others' drafts follow the exact text
        assert stats.total.draft_acceptance_rate > same.speculation.total.draft_acceptance_rate
    assert_ran(watches[1], kind)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_limit_that_nothing_passes_leaves_the_exact_text(greedy: bool) -> None:
    """The tokens between drafts are the target's own, with the same coins; the rule's losses come from accepting."""
    model = tiny().double()
    ids, mask = prompts(LENGTHS)
    settings = {"do_sample": not greedy, **({"temperature": None, "top_k": None} if greedy else {})}
    exact = run(model, None, ids, mask, "rejection", **settings)
    watch = drafter_of("lookup", model, texts_of(exact, mask))
    text = run(model, watch, ids, mask, Typical(1.0, 1e9), **settings)
    assert torch.equal(text, exact) and watch.width and watch.longest == 0
    everything = run(model, watch, ids, mask, Typical(1e-9, 0.0), **settings)
    assert not torch.equal(everything, exact)
    assert [len(path) for path in watch.rounds[1].paths] == watch.rounds[1].proposed


def test_the_law_is_bent() -> None:
    """Negative control: the check that passes for the exact rule sees what this one does."""
    model = tiny(vocab=8, initializer_range=0.2).double()
    prompt = torch.randint(1, 8, (1, 6), generator=torch.Generator().manual_seed(5))
    law = enumerate_law(model, prompt, 2, do_sample=True, top_k=0)
    corpus = [[*prompt[0].tolist(), 1, 2, 3, 4] * 2]
    values = {}
    for rule in ("rejection", "typical"):
        ids = prompt.repeat(600, 1)
        text = run(model, PromptLookup(3, corpus=corpus), ids, rule=rule, max_new_tokens=4, temperature=1.0)
        values[rule] = p_value(text[:, 6:8], law, 8)
    assert values["rejection"] > 1e-4 and values["typical"] < 1e-12, values


def test_rows_do_not_disturb_one_another() -> None:
    model = build("qwen3").double()
    ids, mask = prompts(LENGTHS)
    texts = texts_of(run(model, None, ids, mask, "rejection"), mask)
    drafter = PromptLookup(4, corpus=[garbled(text) for text in texts])
    seeds = [3, 1, 4, 1]
    together = run(model, drafter, ids, mask, seed=seeds)
    assert together.speculation.num_accepted_tokens > 20
    for row, length in enumerate(LENGTHS):
        alone = run(model, drafter, ids[row : row + 1, -length:], seed=[seeds[row]])
        assert torch.equal(together[row, -24 - length :], alone[0])


@pytest.mark.slow
def test_the_kernels_write_the_same_text() -> None:
    pytest.importorskip("triton")
    model = tiny()
    ids, mask = prompts([5, 9])
    texts = texts_of(run(model, None, ids, mask, "rejection"), mask)
    drafter = drafter_of("branches", model, texts)
    expected = run(model, drafter, ids, mask, max_new_tokens=6)
    with use_kernels("triton"), ops.record() as calls:
        text = run(model, drafter, ids, mask, max_new_tokens=6)
    assert torch.equal(text, expected) and calls["typical_tree", "triton"] >= 2


class Same(Handmade):
    """Draft the same two tokens in every round."""

    def on_begin(self, sequences) -> None: ...

    def on_propose(self, sequences) -> Draft:
        return Draft.from_lists([[7, 8][:room] for room in self.room])


@pytest.mark.parametrize("temperature", [0.8, 0.05])
def test_processors_shape_the_law(temperature: float) -> None:
    """What a processor forbids has probability zero: a draft full of it is never accepted, others always are."""
    model = tiny()
    ids, mask = prompts([12])
    asked = {"rule": Typical(1e-30, 0.0), "temperature": temperature}
    banned = run(model, Same(), ids, mask, suppress_tokens=[7], **asked).speculation
    assert banned.num_draft_tokens > 40 and banned.num_accepted_tokens == 0
    free = run(model, Same(), ids, mask, **asked).speculation
    assert free.num_accepted_tokens == free.num_draft_tokens > 10
    few = run(model, Same(), ids, mask, top_k=2, **asked).speculation
    assert few.num_accepted_tokens < few.num_draft_tokens


def test_a_warning_once_per_call_site() -> None:
    model = tiny()
    ids, _ = prompts([12])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        loop = SpeculativeDecoding(PromptLookup(4), "typical")
        for _ in range(3):
            model.generate(ids, custom_generate=loop, max_new_tokens=3)
        enable(model).generate(ids, assistant_model=PromptLookup(4), rule="typical", max_new_tokens=3)
        enable(model).generate(ids, assistant_model=PromptLookup(4), max_new_tokens=3)
    ours = [warning for warning in caught if "lossy" in str(warning.message)]
    assert len(ours) == 2 and all(warning.filename == __file__ for warning in ours)
    assert "rule='typical(threshold=0.09, alpha=0.3)' is lossy" in str(ours[0].message)


def test_what_cannot_be_judged_is_refused_before_the_first_token() -> None:
    model, asked = tiny(), []
    ids, mask = prompts([12])
    settings = {"on_tokens": lambda row, tokens: asked.append(tokens)}
    with pytest.raises(SpecGenError, match=r"draws its tokens.*sample=False.*rejection"):
        run(model, SmallModel(disturbed(model), 3, sample=True), ids, mask, **settings)
    with pytest.raises(SpecGenError, match=r"logits processor of this call.*rejection"):
        run(model, PromptLookup(4), ids, mask, prefix_allowed_tokens_fn=lambda row, sent: [1, 2, 3], **settings)
    with pytest.raises(SpecGenError, match=r"rule='typo' is unknown.*'typical', which is lossy"):
        run(model, PromptLookup(4), ids, mask, "typo", **settings)
    assert asked == []
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "max_new_tokens": 4}
    run(model, SmallModel(disturbed(model), 3, sample=True), ids, mask, **greedy)  # greedy targets: nothing is drawn
    draft = Draft(
        torch.zeros(1, 1, dtype=torch.long), Tree.chain(1), torch.ones(1).long(), DenseQ(torch.zeros(1, 1, 4))
    )
    with pytest.raises(SpecGenError, match="draws its tokens"):
        verify_typical(Dense(torch.zeros(1, 2, 4)), draft, coins(), Typical())


@pytest.mark.parametrize(("threshold", "alpha"), [(0.0, 0.3), (1.1, 0.3), (0.09, -0.1), (0.09, math.nan)])
def test_parameters_out_of_range_are_refused(threshold: float, alpha: float) -> None:
    with pytest.raises(SpecGenError, match=r"0 < threshold <= 1 and 0 <= alpha"):
        Typical(threshold, alpha)


def test_a_broken_row_is_an_error() -> None:
    draft = Draft(torch.tensor([[2]]), Tree.chain(1), torch.tensor([1]))
    assert verify_typical(Dense(torch.full((1, 2, 4), math.nan)), draft, coins(), Typical()).invalid.tolist() == [True]
