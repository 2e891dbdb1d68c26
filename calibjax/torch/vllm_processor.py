"""A logits processor of vLLM that calibrates with an exported head that needs logits only.

    CALIBJAX_HEAD=DIR CALIBJAX_LOGITS=processor vllm serve path/to/model \\
        --logits-processors calibjax.torch.vllm_processor:CalibratedLogits --logprobs-mode processed_logprobs

The class implements both interfaces of vLLM 0.32: that of the first model runner, and that of the second
(`VLLM_USE_V2_MODEL_RUNNER=1`). A processor sees no hidden states: it serves temperature scaling, and heads with the
features logit_statistics, max_logit and log_std_logits. Other heads need the layer of `calibjax.torch.vllm`.

Processors run before the temperature, top-k and top-p of a request, and after its other changes of logits. The head has
to read the model's own logits, so that requests with such changes are refused, with an error of their own.
"""

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from calibjax.torch.heads import Export, HeadError, logit_statistics, read_export, scaled_logits
from calibjax.torch.vllm import HEAD, LOGITS

# By name: type checkers need not find vLLM, which has an environment of its own.
_First: Any = import_module("vllm.v1.sample.logits_processor").LogitsProcessor
_Second: Any = import_module("vllm.v1.worker.gpu.sample.logits_processor").LogitsProcessor

_LOGIT_FEATURES = {"logit_statistics", "max_logit", "log_std_logits"}
# Settings of a request that change logits before a processor in one of the model runners, and what leaves them alone.
_UNCHANGED = {
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "frequency_penalty": (0.0,),
    "logit_bias": (None, {}),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "structured_outputs": (None,),
}


def features_of_logits(names: tuple[str, ...], logits: Tensor) -> Tensor:
    """The features that need logits only, float32 `[N, F]`; log_std_logits of logits `[N, V]` without a soft-cap."""
    logits = logits.to(torch.float32)
    parts = {
        "logit_statistics": lambda: logit_statistics(logits),
        "max_logit": lambda: logits.amax(-1, keepdim=True),
        "log_std_logits": lambda: 0.5 * logits.var(-1, keepdim=True).clamp(min=1e-12).log(),
    }
    return torch.cat([parts[name]() for name in names], dim=-1)


class CalibratedLogits(_First, _Second):
    """See the module.

    Raises:
        HeadError: where the engine starts: no such head, one that reads hidden states or belongs to a model of other
            sizes, `CALIBJAX_LOGITS` other than "processor", or log-probabilities taken before processors.
    """

    def __init__(self, vllm_config: Any, *engine: Any):
        if not os.environ.get(HEAD) or os.environ.get(LOGITS) != "processor":
            raise HeadError(f"a logits processor needs {HEAD}=DIR and {LOGITS}=processor in the environment.")
        model = vllm_config.model_config
        if model.logprobs_mode != "processed_logprobs":
            raise HeadError(
                f"--logprobs-mode {model.logprobs_mode}: taken before logits processors, so that it would not be "
                "calibrated. Use --logprobs-mode processed_logprobs."
            )
        self._export = read_export(os.environ[HEAD])
        _check(self._export, model.get_hidden_size(), model.get_vocab_size())
        self._device: torch.device | None = None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises `ValueError`, which the server returns as 400, for a request that changes logits before the head."""
        changed = [name for name, none in _UNCHANGED.items() if getattr(sampling_params, name, none[0]) not in none]
        if changed:
            raise ValueError(
                f"{', '.join(changed)}: a calibrated server reads the model's own logits, and takes no setting that "
                "changes them. (vLLM reads defaults of the model's generation_config.json; --generation-config vllm "
                "ignores it.)"
            )

    def is_argmax_invariant(self) -> bool:
        # It is, but vLLM runs such processors after the temperature of the request, which would change max_logit.
        return False

    def update_state(self, batch_update: Any) -> None:
        """Does nothing: there is no state between steps."""

    @torch.no_grad()
    def apply(self, logits: Tensor, context: Any = None) -> Tensor:
        """Calibrated logits, float32 `[N, V]`, of logits `[N, V]`."""
        head = self._export.head
        if self._device != logits.device:
            self._device = logits.device
            head.to(logits.device)
        if head.kind == "constant":
            features = logits.new_zeros(len(logits), 1)
        else:
            features = features_of_logits(head.features, logits)
        return scaled_logits(logits, head(features[None])[0])


def _check(export: Export, hidden_size: int, vocab_size: int) -> None:
    """Raises `HeadError` for a head that logits alone do not serve, or of a model of other sizes."""
    head, base = export.head, export.base
    reads_logits = head.kind == "constant" or {*head.features} <= _LOGIT_FEATURES
    if head.reads_sequence or head.pooling == "sequence" or not reads_logits:
        raise HeadError(
            f"{HEAD}: a logits processor sees logits only, and this {head.kind} head reads {', '.join(head.features)}. "
            f"Use {LOGITS}=calibrated, without --logits-processors."
        )
    if base["logit_softcap"] is not None and "log_std_logits" in head.features and head.kind != "constant":
        raise HeadError(f"{HEAD}: log_std_logits is taken before the model's soft-cap. Use {LOGITS}=calibrated.")
    if (base["hidden_size"], base["vocab_size"]) != (hidden_size, vocab_size):
        raise HeadError(
            f"this head was fitted on a model of hidden size {base['hidden_size']} with {base['vocab_size']} tokens, "
            f"the model served has {hidden_size} and {vocab_size}."
        )
