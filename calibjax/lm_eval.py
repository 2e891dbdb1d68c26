"""calibjax as a model of EleutherAI's lm-eval: `--model calibjax --model_args pretrained=...,head=...`.

lm-eval 0.4.13 has no entry points for models: plain `lm_eval` cannot find this one. `python -m calibjax.lm_eval` is the
same command with this model as default and our offline tasks beside the harness's; in Python, importing this module is
enough. It needs `pip install calibjax[lm-eval]`, and no PyTorch.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
from lm_eval.api.registry import register_model

from calibjax.eval.tasks.harness import HarnessLM
from calibjax.eval.tasks.local_data import TASKS
from calibjax.heads import FittedHead
from calibjax.models import load_model
from calibjax.runtime.errors import UserError
from calibjax.runtime.platforms import keep_compiled_programs
from calibjax.runtime.sharding import make_mesh
from calibjax.train import load_head

BATCH_SIZE = 16  # rows per step


@register_model("calibjax")
class CalibjaxLM(HarnessLM):
    """The model of `--model calibjax`; see `HarnessLM` for the other arguments.

    Args:
        pretrained: directory or hub id, as `load_model` takes it.
        head: directory of a fitted head, or of the run that holds it; None for the base model.
        dtype: compute dtype.
        data, fsdp, tensor: devices along each axis of the mesh.
        device: passed by the harness ("cuda:0" by default) and ignored: JAX_PLATFORMS selects the device.
    """

    def __init__(
        self,
        pretrained: str | Path,
        head: str | Path | None = None,
        *,
        batch_size: int | str = BATCH_SIZE,
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
            raise UserError(f"max_batch_size={max_batch_size!r}: not taken; batch_size is the number of rows per step.")
        if not str(batch_size).isdigit():
            raise UserError(f"batch_size: expected a number of rows, got {batch_size!r}.")
        mesh = None if (data, fsdp, tensor) == (1, 1, 1) else make_mesh((data, fsdp, tensor))
        lm = load_model(pretrained, dtype=jnp.dtype(dtype), mesh=mesh)
        heads = {"head": FittedHead.constant(lm) if head is None else load_head(head, lm)}
        super().__init__(
            lm, heads, batch_size=int(batch_size), max_length=max_length, max_gen_toks=max_gen_toks, seed=seed
        )


def main() -> None:
    """Runs lm-eval's command line, whose model here is calibjax and whose batches have our size, not 1, by default."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    keep_compiled_programs()
    setup_logging()
    cli = HarnessCLI()
    given = cli.parse_args()
    if given.command is not None:
        file = getattr(given, "config", None)
        written = {} if file is None else EvaluatorConfig.load_yaml_config(file)
        own = given.include_path or written.get("include_path")
        given.include_path = [str(TASKS), *([] if own is None else [own])]
        if given.command == "run":
            given.model = given.model or written.get("model", "calibjax")
            if "batch_size" not in vars(given) | written:
                given.batch_size = BATCH_SIZE
    try:
        cli.execute(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
