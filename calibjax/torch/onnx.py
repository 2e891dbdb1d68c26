"""Exported heads as ONNX models."""

import logging
import warnings
from pathlib import Path

import torch

from calibjax.torch.heads import load_head


def to_onnx(path: str | Path) -> bytes:
    """Returns the head of an export as an ONNX model; path and errors as of `load_head`. Needs onnx and onnxscript.

    Its inputs are `features` (float32 `[B, T, F]`) and `mask` (bool `[B, T]`, False for padding), its output is
    `log_scale` (float32 `[B, T]`); B and T are of any size.
    """
    head = load_head(path).eval()
    axes = {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}
    logging.disable(logging.WARNING)  # it describes its own workings
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(
                head,
                (torch.zeros(2, 3, head.width), torch.ones(2, 3, dtype=torch.bool)),
                input_names=["features", "mask"],
                output_names=["log_scale"],
                dynamic_shapes=(axes, axes),
                dynamo=True,
                verbose=False,
            )
    finally:
        logging.disable(logging.NOTSET)
    assert program is not None
    return program.model_proto.SerializeToString()
