"""calibjax as a model of EleutherAI's lm-eval: `--model calibjax --model_args pretrained=...,head=...`.

lm-eval 0.4.13 looks for models in its own table alone and has no entry points, so that plain `lm_eval` cannot find this
one. `python -m calibjax.lm_eval` is the same command with the model and our offline tasks registered; in Python,
importing this module is enough. It needs `pip install calibjax[lm-eval]`, and no PyTorch.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
from lm_eval.api.registry import register_model

from calibjax.eval.tasks.harness import HarnessLM
from calibjax.eval.tasks.local_data import TASKS
from calibjax.eval.tokens import identity_head
from calibjax.models import load_model
from calibjax.runtime.errors import UserError
from calibjax.runtime.platforms import keep_compiled_programs
from calibjax.runtime.sharding import make_mesh
from calibjax.train import load_head


@register_model("calibjax")
class CalibjaxLM(HarnessLM):
    """The model of `--model calibjax`; see `HarnessLM`.

    Args:
        pretrained: directory or hub id, as `load_model` takes it.
        head: directory of a fitted head, or of the run that holds it; None for the base model.
        batch_size, max_length, max_gen_toks, seed: as `HarnessLM`'s.
        dtype: compute dtype.
        data, fsdp, tensor: devices along each axis of the mesh.
        device: passed by the harness ("cuda:0" by default) and ignored: JAX_PLATFORMS selects the device.
        max_batch_size: ignored.

    Raises:
        UserError: an argument is out of range, or model and head cannot be loaded together.
    """

    def __init__(
        self,
        pretrained: str | Path,
        head: str | Path | None = None,
        *,
        batch_size: int | str = 16,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        dtype: str = "float32",
        data: int = 1,
        fsdp: int = 1,
        tensor: int = 1,
        device: str | None = None,
        max_batch_size: None = None,
    ):
        if max_batch_size is not None:
            raise UserError(f"max_batch_size={max_batch_size!r}: not taken; batch_size is the number of rows a step.")
        if not str(batch_size).isdigit():
            raise UserError(f"batch_size: expected a number of rows, got {batch_size!r}.")
        mesh = None if (data, fsdp, tensor) == (1, 1, 1) else make_mesh((data, fsdp, tensor))
        lm = load_model(pretrained, dtype=jnp.dtype(dtype), mesh=mesh)
        heads = {"head": identity_head(lm) if head is None else load_head(head, lm)}
        super().__init__(
            lm, heads, batch_size=int(batch_size), max_length=max_length, max_gen_toks=max_gen_toks, seed=seed
        )


def main() -> None:
    """Runs lm-eval's command line with `--model calibjax` and the offline tasks registered."""
    from lm_eval.__main__ import cli_evaluate

    keep_compiled_programs()
    if "--include_path" not in sys.argv and "--tasks" in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()


if __name__ == "__main__":
    main()
