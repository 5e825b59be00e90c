"""Learned drafters that know a few texts by heart: right often, wrong at chosen places, for any target.

Everything but the last matrix is random; that one is solved for, so a drafter costs milliseconds.
"""

from __future__ import annotations

import torch
from draft_math import EagleMath, silu
from oracle import drafter_from
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.models.taps import FINAL, Taps

State = dict[str, Tensor]


def config_of(method: str, model: PreTrainedModel, texts: list[list[int]], **settings: object) -> DrafterConfig:
    """Return a drafter's configuration for a target; ``reduced=True`` keeps the texts' tokens and two more."""
    text = model.config.get_text_config(decoder=True).to_dict()
    width = int(text.get("hidden_size") or text["n_embd"])
    layers = int(text.get("num_hidden_layers") or text["n_layer"])
    sizes = {"hidden_size": width, "target_hidden_size": width, "vocab_size": int(text["vocab_size"])}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 256}
    own: dict[str, object] = {"own_head": method != "eagle"}
    if method == "eagle3":
        own["aux_layer_boundaries"] = sorted({0, min(1, layers), layers})
    if settings.pop("reduced", False):
        own["draft_vocab_size"] = len(kept_ids(texts, sizes["vocab_size"]))
    return DrafterConfig(method, **{**sizes, **heads, **own, **settings})


def kept_ids(texts: list[list[int]], vocab: int) -> list[int]:
    """Return the ids of a reduced vocabulary: those of the texts and the two highest."""
    return sorted({token for text in texts for token in text} | {vocab - 2, vocab - 1})


def random_state(config: DrafterConfig, ids: list[int], seed: int = 0) -> State:
    """Return random weights for every tensor of a drafter, and the map to ``ids`` where it has one."""
    torch.manual_seed(seed)
    state = {}
    for name, value in skeleton(config).state_dict().items():
        if name == "d2t":
            state[name] = torch.tensor(ids) - torch.arange(len(ids))
        elif name == "t2d":
            state[name] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, torch.tensor(ids), True)
        elif "norm" in name:
            state[name] = 1 + 0.2 * torch.randn(value.shape, dtype=torch.float64)
        else:
            state[name] = torch.randn(value.shape, dtype=torch.float64) / max(1, value.shape[-1]) ** 0.5
    return state


def skeleton(config: DrafterConfig) -> LearnedDrafter:
    """Return a drafter without numbers: only its names and shapes are read."""
    with torch.device("meta"):
        return drafter_from((config, None))


@torch.no_grad()
def read(model: PreTrainedModel, text: list[int], boundaries: tuple[int, ...]) -> list[Tensor]:
    """Return a text's hidden states ``(P, D)`` at each boundary, in float64."""
    taps = Taps(model, boundaries)
    with taps.on() as seen:
        model(torch.tensor([text]), use_cache=False)
        return [layer[0].double() for layer in taps.read(seen, torch.device("cpu"))]


def blurred(wanted: Tensor, other: Tensor, tokens: list[int], wrong: int) -> Tensor:
    """Mix the rows of ``other`` into those whose token is a multiple of ``wrong``: their own comes second there."""
    if not wrong:
        return wanted
    here = torch.tensor([token % wrong == 0 for token in tokens], dtype=torch.bool)[:, None]
    return torch.where(here, 0.4 * wanted + 0.6 * other, wanted)


def one_hot(tokens: list[int], ids: list[int]) -> Tensor:
    """Return ``(n, Vd)``: tokens that the draft vocabulary lacks are nothing."""
    place = {token: index for index, token in enumerate(ids)}
    rows = torch.zeros(len(tokens), len(ids), dtype=torch.float64)
    for row, token in enumerate(tokens):
        if token in place:
            rows[row, place[token]] = 1.0
    return rows


def separated(x: Tensor, wanted: Tensor, steps: int = 20) -> Tensor:
    """Return weights ``(V, H)`` of the softmax regression of ``wanted (n, V)`` on ``x (n, H)``."""
    weight = torch.zeros(wanted.shape[1], x.shape[1], dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([weight], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        value = -(wanted * (x @ weight.T).log_softmax(-1)).sum() / max(1, len(x)) + 1e-5 * (weight**2).sum()
        value.backward()
        return value

    with torch.enable_grad():
        search.step(loss)
    return weight.detach()


def known(x: Tensor, tokens: list[int], ids: list[int], wrong: int) -> Tensor:
    """Return a head that names ``tokens`` at ``x (n, H)``, the id after them first at every ``wrong``-th token."""
    wanted = one_hot(tokens, ids)
    return separated(x, blurred(wanted, wanted.roll(1, 1), tokens, wrong))


def fit_medusa(config: DrafterConfig, state: State, model: PreTrainedModel, texts: list[list[int]], wrong: int) -> None:
    """Solve each head's last matrix over its random block."""
    ids = kept_ids(texts, config.vocab_size) if config.reduces_vocabulary else list(range(config.vocab_size))
    states = [(text, read(model, text, (FINAL,))[0]) for text in texts]
    for head in range(config.num_heads):
        ahead = head + 2
        x = torch.cat([x[:-ahead] for text, x in states if len(text) > ahead] or [states[0][1][:0]])
        tokens = [token for text, _ in states if len(text) > ahead for token in text[ahead:]]
        for layer in range(config.num_head_layers):
            name = f"{head}.{layer}.linear"
            x = x + silu(x @ state[f"{name}.weight"].T + state[f"{name}.bias"])
        state[f"{head}.{config.num_head_layers}.weight"] = known(x, tokens, ids, wrong)


def fit_eagle(config: DrafterConfig, state: State, model: PreTrainedModel, texts: list[list[int]], wrong: int) -> None:
    """Solve the MLP's last matrix so that states are the next features, then EAGLE-3's own head over the states."""
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    maths = EagleMath(config, state, embedding, head)
    read_texts = [(text, read(model, text, (*config.aux_layer_boundaries, FINAL))) for text in texts if len(text) > 2]
    if not read_texts:
        return
    if config.method == "eagle3" and not config.own_head:  # features are then what the target's head reads
        joined = torch.cat([torch.cat(streams[:-1], -1) for _, streams in read_texts])
        finals = torch.cat([streams[-1] for _, streams in read_texts]) / state["norm.weight"]
        maths.state["fc.weight"] = torch.linalg.lstsq(joined, finals, driver="gelsd").solution.T.contiguous()
    rows = []
    for text, streams in read_texts:
        features, order = maths.feature(streams[:-1] or streams), torch.arange(len(text) - 2)
        pairs = torch.tensor(text[1:-1]), features[:-2], order, order[:, None] >= order
        rows.append((pairs, features[1:-1], text[2:]))
    norm_output = config.to_dict().get("norm_output", False)  # of EAGLE-3 alone
    if not norm_output:
        solve_mlp(maths, rows, 0 if config.own_head else wrong)
    if config.own_head:
        ids = kept_ids(texts, config.vocab_size) if config.reduces_vocabulary else list(range(config.vocab_size))
        states = torch.cat([maths.states(*pairs) for pairs, _, _ in rows])
        x = states if norm_output else maths.norm("norm", states)
        state["lm_head.weight"] = known(x, [token for _, _, after in rows for token in after], ids, wrong)
    state |= {name: value for name, value in maths.state.items() if name != "lm_head.weight"}


def solve_mlp(maths: EagleMath, rows: list[tuple[tuple[Tensor, ...], Tensor, list[int]]], wrong: int) -> None:
    """Solve the last MLP's last matrix: behind it stand the states that are wanted."""
    read, gaps = [], []
    for pairs, wanted, after in rows:
        name, y = maths.before_mlp(*pairs)
        read.append(maths.opened(name, y))
        gaps.append(blurred(wanted, wanted.roll(1, 0), after, wrong) - y)
    name = f"{name}.mlp.down_proj"
    bias = maths.state.get(f"{name}.bias", torch.zeros(()).double())
    solution = torch.linalg.lstsq(torch.cat(read), torch.cat(gaps) - bias, driver="gelsd").solution
    maths.state[f"{name}.weight"] = solution.T.contiguous()


def fitted(
    method: str, model: PreTrainedModel, texts: list[list[int]], wrong: int = 5, seed: int = 0, **settings: object
) -> LearnedDrafter:
    """Build a drafter that knows ``texts`` but for tokens that are multiples of ``wrong`` (0: knows them all)."""
    config = config_of(method, model, texts, **settings)
    state = random_state(config, kept_ids(texts, config.vocab_size), seed)
    texts = [[token for token in text if token < config.vocab_size] for text in texts] or [[0]]
    (fit_medusa if method == "medusa" else fit_eagle)(config, state, model, texts, wrong)
    return drafter_from((config, state), model.dtype)


def untrained(method: str, model: PreTrainedModel, ids: list[int], seed: int = 0, **settings: object) -> LearnedDrafter:
    """Build a drafter of random weights; ``ids`` (and the two highest) are its vocabulary with ``reduced=True``."""
    config = config_of(method, model, [ids], **settings)
    return drafter_from((config, random_state(config, kept_ids([ids], config.vocab_size), seed)), model.dtype)
