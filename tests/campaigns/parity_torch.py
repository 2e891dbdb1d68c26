"""Every head on a small random model of every family: PyTorch by `calibjax.torch.attach` against JAX.

    python tests/campaigns/parity_torch.py [FAMILY...] [--heads constant linear mlp transformer]

Prints a row for each family, as in docs/serving.md: the largest difference of calibrated log-probabilities (relative
where one exceeds 1 nat) and of temperatures, with padding on the left, for each head; and whether the greedy tokens
are the same. Exits with 1 where a difference exceeds 1e-5 or a token differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from parity import MULTIMODAL, VARIANTS, multimodal_model, settings_of, torch_model
from test_torch import GREEDY, PROMPTS, compare
from tiny import random_head

from calibjax.heads import FEATURES, HEADS
from calibjax.models import load_model
from calibjax.models.generate import generate
from calibjax.train.saved import export_head


def greedy_is_equal(theirs, lm, head, folder: Path) -> bool:
    """Greedy tokens of both, with the head, after prompts of different lengths."""
    from calibjax.torch import attach

    ours = generate(lm, PROMPTS, head=head, max_new_tokens=6, stop_tokens=())
    tokens = torch.tensor([[0, 0, *PROMPTS[0]], PROMPTS[1]])
    export_head(folder, head, lm)
    attached = attach(theirs, folder)
    got = theirs.generate(tokens, attention_mask=(tokens > 0).int(), **GREEDY)
    attached.detach()
    return np.array_equal(got[:, 5:].numpy(), np.asarray(ours.tokens))


def main(families: list[str], kinds: list[str]) -> int:
    failures = 0
    for family in families:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if family in MULTIMODAL:
                theirs = multimodal_model(folder, family)
            else:
                theirs, _ = torch_model(folder, settings_of(family, next(iter(VARIANTS[family]))))
            lm = load_model(folder)
            features = {kind: ("hidden_states",) if kind == "constant" else tuple(FEATURES) for kind in kinds}
            heads = {kind: random_head(lm, kind, names) for kind, names in features.items()}
            errors = {kind: max(compare(theirs, lm, head, folder / kind)) for kind, head in heads.items()}
            is_equal = greedy_is_equal(theirs, lm, heads[kinds[-1]], folder / "greedy")
        failures += not (max(errors.values()) <= 1e-5 and is_equal)
        cells = (f"{error:.1e}" for error in errors.values())
        print(f"| {family} | {' | '.join(cells)} | {'equal' if is_equal else 'DIFFERENT'} |", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    known = [*(family for family in VARIANTS if family != "qwen"), *MULTIMODAL]  # transformers does not run Qwen v1
    parser.add_argument("families", nargs="*", default=known)
    parser.add_argument("--heads", nargs="*", default=list(HEADS))
    given = parser.parse_args()
    sys.exit(main(given.families or known, given.heads))
