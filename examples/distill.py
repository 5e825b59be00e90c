"""Distill a target into a small model of its family, so that the small one drafts better (DistillSpec).

python examples/distill.py --target org/large --drafter org/small --data answers.jsonl --output small-distilled
python examples/distill.py --smoke    # tiny random models, seconds
"""

import argparse
import copy
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_specgen
from hf_specgen.trainers.data import load_data, prepare_dataset
from hf_specgen.trainers.distill import DistillArguments, DistillTrainer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = LlamaConfig(vocab_size=64, initializer_range=0.3, eos_token_id=None, pad_token_id=0, **SIZES)


def tiny_data() -> tuple[LlamaForCausalLM, LlamaForCausalLM, list[dict[str, list[int]]]]:
    """Build a random target, a disturbed copy of it to train, and 16 texts of the target."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(TINY).eval()
    small = copy.deepcopy(target)
    for weight in small.parameters():
        weight.data += 0.3 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    prompts = torch.randint(1, 64, (16, 4))
    texts = target.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False)
    return target, small, [{"input_ids": text, "loss_mask": [0] * 4 + [1] * 12} for text in texts.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="HuggingFaceTB/SmolLM2-1.7B-Instruct")
    parser.add_argument("--drafter", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="jsonl or parquet: messages, prompt and completion, or token ids")
    parser.add_argument("--output", default="small-distilled")
    parser.add_argument("--smoke", action="store_true", help="use tiny random models")
    options = parser.parse_args()
    if options.smoke:
        (target, small, rows), options.output = tiny_data(), tempfile.mkdtemp()
    else:
        target = AutoModelForCausalLM.from_pretrained(options.target, dtype="auto")
        small = AutoModelForCausalLM.from_pretrained(options.drafter, dtype=torch.float32)
        rows = prepare_dataset(load_data(options.data), AutoTokenizer.from_pretrained(options.target))
    short = {"max_steps": 30, "learning_rate": 3e-3, "use_cpu": True} if options.smoke else {"bf16": True}
    trainer = DistillTrainer(small, target, DistillArguments(options.output, **short), train_dataset=rows)
    trainer.train()
    trainer.save_model()
    prompt = torch.tensor([rows[0]["input_ids"][:4]], device=target.device)
    drafter = hf_specgen.SmallModel(small.eval().to(target.dtype), num_tokens=4)
    loop = hf_specgen.SpeculativeDecoding(drafter)
    out = target.generate(prompt, max_new_tokens=12, do_sample=False, custom_generate=loop)
    print(f"{out.speculation.tokens_per_round:.2f} tokens a round, written to {options.output}")


if __name__ == "__main__":
    main()
