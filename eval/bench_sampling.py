"""Throughput of eight samples a prompt: calibjax.generate against transformers' generate, in turn. Needs PyTorch.

python eval/bench_sampling.py MODEL [--prompt 128] [--new 32]
"""

import argparse
import time
from typing import Any

import jax
import numpy as np
import torch
import transformers

import calibjax

PROMPTS, SAMPLES, ROUNDS = 8, 8, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of a sample")
    given = parser.parse_args()
    lm = calibjax.load_model(given.model)
    prompts = np.random.default_rng(0).integers(3, lm.config.vocab_size, (PROMPTS, given.prompt)).tolist()
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype="float32").eval()
    other.generation_config.eos_token_id = None
    ids = torch.tensor(prompts)
    config = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": SAMPLES, "pad_token_id": 0}

    def theirs(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.no_grad():
            mask = torch.ones_like(ids)
            return other.generate(ids, attention_mask=mask, max_new_tokens=given.new, **config)[
                :, given.prompt :
            ].numel()

    def ours(seed: int) -> int:
        sampling = calibjax.Sampling(temperature=1.0, key=jax.random.key(seed), count=SAMPLES)
        made = calibjax.generate(lm, prompts, max_new_tokens=given.new, stop_tokens=(), sampling=sampling)
        return int(np.asarray(made.where).sum())

    seconds = {"calibjax": [], "transformers": []}
    for seed in range(-1, ROUNDS):  # the first round compiles, and is not counted
        for name, run in (("calibjax", ours), ("transformers", theirs)):
            start = time.perf_counter()
            assert run(seed + 1) == PROMPTS * SAMPLES * given.new
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        rates = [PROMPTS * SAMPLES * given.new / value for value in times[1:]]
        print(f"{name}: {np.median(rates):,.0f} tokens/s at the median, {max(rates):,.0f} at best")


if __name__ == "__main__":
    main()
