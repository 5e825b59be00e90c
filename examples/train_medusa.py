"""Train Medusa heads: several small heads that each guess a token further ahead. The cheapest drafter to train.

python examples/train_medusa.py --target org/model --data answers.jsonl --output my-heads
python examples/train_medusa.py --smoke    # a tiny random target, seconds
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_specgen
from hf_specgen.trainers.data import load_data, prepare_dataset
from hf_specgen.trainers.medusa import MedusaArguments, MedusaTrainer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
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
    parser.add_argument("--output", default="my-heads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--smoke", action="store_true", help="use a tiny random target")
    options = parser.parse_args()
    if options.smoke:
        (target, rows), options.output = tiny_data(), tempfile.mkdtemp()
    else:
        target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
        rows = prepare_dataset(load_data(options.data), AutoTokenizer.from_pretrained(options.target))

    heads = hf_specgen.MedusaDrafter.for_target(target, num_heads=options.heads).float()
    short = {"max_steps": 150, "learning_rate": 1e-2, "use_cpu": True} if options.smoke else {"bf16": True}
    trainer = MedusaTrainer(heads, target, MedusaArguments(options.output, **short), train_dataset=rows)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()

    heads = hf_specgen.load_drafter(options.output, target=target, tree="chain", num_tokens=3)
    prompt = torch.tensor([rows[0]["input_ids"][:4]], device=target.device)
    out = target.generate(prompt, max_new_tokens=12, custom_generate=hf_specgen.SpeculativeDecoding(heads))
    print(f"{out.speculation.tokens_per_round:.2f} tokens a round, written to {options.output}")


if __name__ == "__main__":
    main()
