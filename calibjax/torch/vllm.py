"""A plugin of vLLM that replaces its layer of logits by one that calibrates them with an exported head.

    pip install --no-deps lazy_loader calibjax       # beside vLLM; JAX is not needed
    CALIBJAX_HEAD=DIR vllm serve path/to/model       # a directory of `calibjax export`, or org/name@revision

`CALIBJAX_LOGITS=calibrated`, the default: logits, and with them log-probabilities and sampling, are calibrated.
`CALIBJAX_LOGITS=unchanged`: tokens are sampled as without the plugin; the log-probabilities returned are calibrated.
Both change log-probabilities of `--logprobs-mode raw_logprobs`, vLLM's default: those before penalties and temperature.
"""

import inspect
import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from calibjax.torch.heads import Export, HeadError, read_export, scaled_logits

HEAD, LOGITS = "CALIBJAX_HEAD", "CALIBJAX_LOGITS"


def register() -> None:
    """Entry point of `vllm.general_plugins`; does nothing where `CALIBJAX_HEAD` is not set.

    Raises:
        HeadError: no such head, one that reads other tokens, or a version of vLLM whose layer of logits differs.
    """
    if not os.environ.get(HEAD):
        return
    mode = os.environ.get(LOGITS, "calibrated")
    if mode not in ("calibrated", "unchanged"):
        raise HeadError(f'{LOGITS}: expected "calibrated" or "unchanged", got {mode!r}.')
    if import_module("vllm.platforms").current_platform.is_tpu():
        raise HeadError(f"{HEAD}: vLLM's models for TPUs have another layer of logits. Unset it.")
    export = read_export(os.environ[HEAD])
    if export.head.reads_sequence or export.head.pooling == "sequence":
        reason = "this head reads other tokens than the one it calibrates, which vLLM's layer of logits does not see"
        raise HeadError(f"{HEAD}: {reason}. Fit a linear or an mlp head, pooled by token.")
    _replace_layer(_Calibration(export), mode == "calibrated")


class _Calibration:
    """A head with the unembedding that vLLM holds."""

    def __init__(self, export: Export):
        self._export, self._head = export, export.head
        self._covariance: Tensor | None = None
        self._is_ready = False

    @torch.no_grad()
    def log_scale(self, lm_head: Any, hidden: Tensor, logits: Tensor, bias: Tensor | None) -> Tensor:
        """Log inverse temperatures `[tokens]` of hidden states `[tokens, D]` and their logits `[tokens, V]`."""
        if not self._is_ready:
            self._prepare(lm_head, hidden, bias)
        return self._head(self._export.features(hidden, logits, lm_head.weight, self._covariance)[None])[0]

    def _prepare(self, lm_head: Any, hidden: Tensor, bias: Tensor | None) -> None:
        self._export.check_hidden_size(hidden.shape[-1])
        weight, shard = lm_head.weight, lm_head.shard_indices
        start, stop = shard.org_vocab_start_index, shard.org_vocab_end_index
        reads_unembedding = {"argmax_embedding", "log_std_logits"} & {*self._head.features}
        if reads_unembedding and stop - start < self._export.base["vocab_size"]:
            raise HeadError("features argmax_embedding and log_std_logits need the whole unembedding on one device.")
        tokens = self._export.probe["tokens"].long()
        here = (tokens >= start) & (tokens < stop)
        rows = weight[(tokens[here] - start).to(weight.device)].to(torch.float32).cpu()
        expected = self._export.probe["unembedding"][here]
        limit = 1e-6 if weight.dtype == torch.float32 else 1e-2
        distance, size = float((rows - expected).norm()), float(expected.norm())
        if len(rows) and not distance <= limit * size:  # NaN is refused too
            raise HeadError("this head was fitted on another base model: the unembedding differs. Fit one for this.")
        self._covariance = self._export.covariance(weight[: stop - start], bias)
        self._head.to(hidden.device)
        self._is_ready = True


def _replace_layer(calibration: _Calibration, calibrates_sampling: bool) -> None:
    # By name: type checkers need not find vLLM, which has an environment of its own.
    version = import_module("vllm").__version__
    try:
        get_config: Any = import_module("vllm.config").get_current_vllm_config
        registered: Any = import_module("vllm.model_executor.custom_op").op_registry_oot
        LogitsProcessor: Any = import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor
        Sampler: Any = import_module("vllm.v1.sample.sampler").Sampler
        parameters = [*inspect.signature(LogitsProcessor.forward).parameters][:4]
        _ = Sampler.compute_logprobs
    except (ImportError, AttributeError):
        parameters = []
    if parameters != ["self", "lm_head", "hidden_states", "embedding_bias"]:
        raise HeadError(f"vLLM {version}: its layer of logits differs from vLLM 0.32. Install 0.32, or unset {HEAD}.")
    if LogitsProcessor.__name__ in registered:
        return  # a second call in this process
    scales = WeakTensorKeyDictionary()

    class CalibratedLogits(LogitsProcessor):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            config = get_config()
            bypasses_sampler = getattr(config, "use_v2_model_runner", False) or config.speculative_config is not None
            if bypasses_sampler and not calibrates_sampling:
                needed = "vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0) and no speculative decoding"
                raise HeadError(f"{LOGITS}=unchanged needs {needed}. Use {LOGITS}=calibrated.")
            if self.logits_as_input:
                raise HeadError("this model gives its layer of logits no hidden states, which a head needs.")

        def forward(
            self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None = None, skip_gather: bool = False
        ) -> Tensor | None:
            if skip_gather:
                raise HeadError("a head needs the logits of the whole vocabulary; this engine divides them.")
            logits = super().forward(lm_head, hidden_states, embedding_bias)
            if logits is None:  # on all ranks but one
                return None
            log_scale = calibration.log_scale(lm_head, hidden_states, logits, embedding_bias)
            if calibrates_sampling:
                return scaled_logits(logits, log_scale)
            scales[logits] = log_scale
            return logits

    LogitsProcessor.register_oot(CalibratedLogits)
    if not calibrates_sampling:

        def compute_logprobs(logits: Tensor) -> Tensor:
            if logits not in scales:
                raise HeadError(f"{LOGITS}=unchanged: these logits do not come from vLLM's layer. Use calibrated.")
            return scaled_logits(logits, scales[logits]).log_softmax(dim=-1, dtype=torch.float32)

        Sampler.compute_logprobs = staticmethod(compute_logprobs)
