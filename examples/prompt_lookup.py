"""Speed up summarising with prompt lookup: no second model, the same greedy text.

python examples/prompt_lookup.py            # SmolLM2-135M-Instruct, fetched once
python examples/prompt_lookup.py --smoke    # a tiny random model, seconds
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_specgen

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = LlamaConfig(vocab_size=64, initializer_range=0.05, eos_token_id=None, pad_token_id=0, **SIZES)

TEXT = """The harbour of Veldmouth was dug in 1683 for ships that carried salt. When the salt trade ended, the town
turned to herring, and the quays were raised by a metre to keep the autumn floods out. The railway came in 1871 and
took the herring inland, so the town grew a second quay. Today the first quay is a market, the second a museum."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="use a tiny random model")
    smoke = parser.parse_args().smoke
    if smoke:
        torch.manual_seed(0)
        model = LlamaForCausalLM(TINY).eval()
        inputs = {"input_ids": torch.arange(1, 13).repeat(1, 3)}
    else:
        from hf_specgen.measure.demo import load_target

        model, tokenizer = load_target("demo")
        chat = [{"role": "user", "content": f"Summarize this text, keeping its wording.\n\n{TEXT}"}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

    settings = {"max_new_tokens": 80 if smoke else 96, "do_sample": False}
    model.generate(**inputs, **{**settings, "max_new_tokens": 4})  # warm up
    started = time.perf_counter()
    plain = model.generate(**inputs, **settings)
    plain_seconds = time.perf_counter() - started

    hf_specgen.enable(model)
    started = time.perf_counter()
    fast = model.generate(**inputs, **settings, assistant_model=hf_specgen.PromptLookup(num_tokens=8))
    seconds = time.perf_counter() - started

    stats = fast.speculation
    print("plain over speculative time:", round(plain_seconds / seconds, 2))
    print("tokens per target forward:  ", round(stats.tokens_per_round, 2))
    print("same text as plain greedy:  ", torch.equal(plain, fast))
    if not smoke:
        print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
