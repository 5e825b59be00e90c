"""Let a small model draft for a larger one, for a whole batch of prompts of different length.

python examples/small_model.py --target HuggingFaceTB/SmolLM2-1.7B-Instruct --drafter demo
python examples/small_model.py --smoke    # tiny random models, seconds
"""

import argparse
import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specgen

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = LlamaConfig(vocab_size=64, initializer_range=0.05, eos_token_id=None, pad_token_id=0, **SIZES)

PROMPTS = ["The capital of France is", "Water boils at", "To sort a list in Python, you can call"]


def tiny_pair() -> tuple[LlamaForCausalLM, LlamaForCausalLM, dict[str, torch.Tensor]]:
    """Build a random target, a drafter that nearly agrees with it, and a left-padded batch."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(TINY).eval()
    drafter = copy.deepcopy(target)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += 0.02 * weight.std() * torch.randn_like(weight)
    ids = torch.tensor([[0, 0, 5, 9, 3], [7, 8, 2, 1, 6]])
    return target, drafter, {"input_ids": ids, "attention_mask": (ids > 0).long()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo", help="folder, Hub id, or demo")
    parser.add_argument("--drafter", default="demo", help="folder, Hub id, or demo")
    parser.add_argument("--smoke", action="store_true", help="use tiny random models")
    options = parser.parse_args()
    if options.smoke:
        target, small, inputs = tiny_pair()
        drafter = hf_specgen.SmallModel(small, num_tokens=4)
    else:
        from hf_specgen.measure.demo import load_target

        target, tokenizer = load_target(options.target)
        small, small_tokenizer = load_target(options.drafter)
        tokenizer.padding_side = "left"
        inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
        drafter = hf_specgen.SmallModel(small, tokenizer=small_tokenizer)

    hf_specgen.enable(target)
    out = target.generate(**inputs, max_new_tokens=32, do_sample=False, assistant_model=drafter)
    for row, stats in enumerate(out.speculation.rows):
        print(f"row {row}: {stats.num_tokens} tokens, {stats.tokens_per_round:.2f} per target forward")
    print("acceptance per position:", [round(rate, 2) for rate in out.speculation.acceptance_rates])


if __name__ == "__main__":
    main()
