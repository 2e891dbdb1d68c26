"""Writes tests/goldens/generation.npz: what transformers generates greedily with the real models. Needs PyTorch.

python tests/make_generation_goldens.py
"""

import numpy as np
import torch
import transformers
from assets import MODELS, model_path
from parity import GOLDENS

PROMPT = "Once upon a time"


def main():
    arrays = {"version": transformers.__version__}
    for name in MODELS:
        model = transformers.AutoModelForCausalLM.from_pretrained(model_path(name), dtype="float32").eval()
        # They end their stories before 200 tokens, and what follows is as good a test.
        model.generation_config.eos_token_id = None
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_path(name))
        prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
        longest = min(200, model.config.max_position_embeddings - prompt.shape[1])
        config = transformers.GenerationConfig(do_sample=False, max_new_tokens=longest, pad_token_id=0)
        with torch.no_grad():
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
            logits = model(tokens).logits[0]
        top = logits.topk(2).values[prompt.shape[1] - 1 : -1]
        print(f"{name}: {longest} tokens, smallest lead of the first logit {float((top[:, 0] - top[:, 1]).min()):.1e}")
        arrays[f"{name}-prompt"], arrays[name] = prompt[0].numpy(), tokens[0, prompt.shape[1] :].numpy()
    np.savez_compressed(GOLDENS / "generation.npz", **arrays)


if __name__ == "__main__":
    main()
