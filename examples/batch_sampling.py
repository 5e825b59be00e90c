"""Sample a batch with one seed per row and stream every row: a row's text does not depend on its neighbours.

python examples/batch_sampling.py --smoke
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specgen

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = LlamaConfig(vocab_size=64, initializer_range=0.05, eos_token_id=None, pad_token_id=0, **SIZES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="accepted for symmetry: this example is always small")
    parser.parse_args()
    torch.manual_seed(0)
    model = hf_specgen.enable(LlamaForCausalLM(TINY).eval())
    ids = torch.tensor([[0, 0, 0, 5, 9, 5, 9, 5], [7, 8, 2, 1, 7, 8, 2, 1], [0, 0, 4, 4, 4, 4, 4, 4]])
    mask = (ids > 0).long()
    settings = {"do_sample": True, "temperature": 0.4, "top_p": 0.9, "max_new_tokens": 24}
    drafter = hf_specgen.PromptLookup(num_tokens=4)

    def show(row: int, tokens: list[int]) -> None:
        print(f"  row {row} +{tokens}")

    print("streamed, several tokens at a time:")
    batch = model.generate(
        ids, attention_mask=mask, assistant_model=drafter, seed=[11, 12, 13], on_tokens=show, **settings
    )
    for row, seed in enumerate((11, 12, 13)):
        prompt = ids[row : row + 1, mask[row].argmax() :]
        alone = model.generate(prompt, assistant_model=drafter, seed=seed, **settings)
        same = torch.equal(alone[0, prompt.shape[1] :], batch[row, ids.shape[1] :])
        print(f"row {row} alone gives the same text: {same}")


if __name__ == "__main__":
    main()
