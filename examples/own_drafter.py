"""Write a drafter of your own: here, a table of which token followed which. Whatever it proposes, the text is exact.

python examples/own_drafter.py
"""

import argparse
from itertools import pairwise

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specgen
from hf_specgen import Call, Draft, Drafter, Session

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = LlamaConfig(vocab_size=64, initializer_range=0.05, eos_token_id=None, pad_token_id=0, **SIZES)


class Bigrams(Drafter):
    """Propose the token that last followed the newest one, and so on, four times."""

    def begin(self, call: Call) -> Session:
        return BigramSession(call)


class BigramSession(Session):
    """Keep what belongs to one call: the table."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.follower = {first: then for tokens in call.sequences.tokens for first, then in pairwise(tokens)}

    def propose(self, room: list[int]) -> Draft:
        drafts = []
        for tokens, space in zip(self.call.sequences.tokens, room, strict=True):
            self.follower.update(pairwise(tokens[-6:]))  # what the last round added
            draft = [tokens[-1]]
            while len(draft) <= min(4, space) and draft[-1] in self.follower:
                draft.append(self.follower[draft[-1]])
            drafts.append(draft[1:])
        return Draft.from_lists(drafts, self.call.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="accepted for symmetry: this example is always small")
    parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY).eval()
    prompt = torch.randint(1, 64, (2, 12))
    sampling = {"do_sample": True, "temperature": 0.02, "max_new_tokens": 100}

    alone = model.generate(prompt, custom_generate=hf_specgen.SpeculativeDecoding(), seed=7, **sampling)
    drafted = model.generate(prompt, custom_generate=hf_specgen.SpeculativeDecoding(Bigrams()), seed=7, **sampling)
    print("same seed, same text:", torch.equal(alone, drafted))
    print("forwards without and with drafts:", alone.speculation.num_forwards, drafted.speculation.num_forwards)


if __name__ == "__main__":
    main()
