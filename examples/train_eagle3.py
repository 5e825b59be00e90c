"""Train an EAGLE-3 drafter on texts that the target wrote, then decode with it.

python examples/train_eagle3.py --target org/model --data answers.jsonl --output my-drafter
python examples/train_eagle3.py --smoke    # a tiny random target, seconds
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_specgen
from hf_specgen.trainers.data import DataOptions, load_data, prepare_dataset
from hf_specgen.trainers.eagle3 import Eagle3Arguments, Eagle3Trainer
from hf_specgen.trainers.vocabulary import choose_vocabulary, count_supervised
from hf_specgen.trainers.warm_start import always_covered, new_drafter

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY = LlamaConfig(vocab_size=64, initializer_range=0.3, eos_token_id=None, pad_token_id=0, **SIZES)


def tiny_data() -> tuple[LlamaForCausalLM, list[dict[str, list[int]]]]:
    """Build a random target and let it write 16 texts."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(TINY).eval()
    prompts = torch.randint(1, 64, (16, 4))
    texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False)
    return target, [{"input_ids": text, "loss_mask": [0] * 4 + [1] * 12} for text in texts.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="jsonl or parquet: messages, prompt and completion, or token ids")
    parser.add_argument("--output", default="my-drafter")
    parser.add_argument("--smoke", action="store_true", help="use a tiny random target")
    options = parser.parse_args()
    if options.smoke:
        (target, rows), size, options.output = tiny_data(), 48, tempfile.mkdtemp()
    else:
        target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(options.target)
        rows, size = prepare_dataset(load_data(options.data), tokenizer, DataOptions(max_length=2048)), 8192

    _, covered = choose_vocabulary(count_supervised(rows, target.config.vocab_size), size, always_covered(target))
    drafter, notes = new_drafter("eagle3", target, covered.nonzero()[:, 0])
    print("starts from:", "; ".join(notes))
    short = {"max_steps": 30, "steps": 3, "learning_rate": 1e-2, "use_cpu": True} if options.smoke else {"bf16": True}
    Eagle3Trainer(drafter, target, Eagle3Arguments(options.output, **short), train_dataset=rows).train()
    drafter.save_pretrained(options.output)

    drafter = hf_specgen.load_drafter(options.output, target=target, num_tokens=3)
    prompt = torch.tensor([rows[0]["input_ids"][:4]], device=target.device)
    out = target.generate(prompt, max_new_tokens=12, custom_generate=hf_specgen.SpeculativeDecoding(drafter))
    print(f"{out.speculation.tokens_per_round:.2f} tokens a round, written to {options.output}")


if __name__ == "__main__":
    main()
