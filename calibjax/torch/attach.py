"""Exported heads on models of transformers."""

import inspect
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibjax.torch.heads import Export, HeadError, Past, read_export, scaled_logits


class TokenScores(NamedTuple):
    """Scores of all tokens but the first by `Attached.score`, float32 `[B, T - 1]` each; 0 on padding."""

    log_probs: Tensor  # calibrated log-probability of the token, nats
    confidence: Tensor  # calibrated probability of the most likely token at its position
    temperature: Tensor


class Generated(NamedTuple):
    """Returned by `Attached.generate`: `sequences` `[B, T]`, prompt included, and `TokenScores` of them."""

    sequences: Tensor
    scores: TokenScores


class Attached:
    """A head attached to a model by `attach`. `detach` removes it."""

    def __init__(self, model: Any, export: Export, calibrate: bool):
        self.model, self.head, self._export, self._calibrate = model, export.head, export, calibrate
        self._hidden: Tensor | None = None
        self._id = uuid.uuid4().hex  # of its layer in a cache, also in a copy of it
        layer = model.get_output_embeddings()
        self.head.to(layer.weight.device)
        self._covariance = export.covariance(layer.weight, getattr(layer, "bias", None))
        self._hooks = [
            model.base_model.register_forward_hook(self._keep_hidden),
            model.register_forward_hook(self._calibrate_output, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Removes the head; the model returns its own logits again."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def score(self, tokens: Tensor, attention_mask: Tensor | None = None) -> TokenScores:
        """Scores token ids `[B, T]` with one forward pass; `attention_mask` `[B, T]` is 0 for padding."""
        calibrate, self._calibrate = self._calibrate, True
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        tokens = tokens * mask  # padding may be no id
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # as in `generate`; the model itself would count padding
        try:
            output = self.model(tokens, attention_mask=attention_mask, position_ids=positions, use_cache=False)
        finally:
            self._calibrate = calibrate
        log_probs = output.logits[:, :-1].to(torch.float32).log_softmax(-1)
        target_log_probs = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
        real = (mask[:, 1:] * mask[:, :-1]).bool()
        scores = (target_log_probs, log_probs.amax(-1).exp(), torch.exp(-output.log_scale[:, :-1]))
        return TokenScores(*(torch.where(real, x, 0.0) for x in scores))

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Generated:
        """Generates by `model.generate` with `options`, then scores prompt and answer with one more forward pass.

        What follows an end or a stop string has no score, like padding. `input_ids` are token ids `[B, T]` with
        padding on the left, where `attention_mask` `[B, T]` is 0. Beam search does not return which criteria ended a
        sequence: they are evaluated again, on its prefixes, so they must depend on the tokens alone.
        """
        from transformers.generation import stopping_criteria as stopping

        configs = [self.model.generation_config, options.get("generation_config")]
        known = (config.to_dict().items() for config in configs if config is not None)
        settings = {name: value for items in known for name, value in items if value is not None} | options
        criteria: Any = stopping.StoppingCriteriaList(settings.get("stopping_criteria") or ())
        if (end := settings.get("eos_token_id")) is not None:
            criteria.append(stopping.EosTokenCriteria(end))
        if strings := settings.get("stop_strings"):
            criteria.append(stopping.StopStringCriteria(options["tokenizer"], strings))
        answers: list[Tensor] = []  # which rows end at each token
        last = input_ids

        def record(tokens: Tensor, scores: Any, **more: Any) -> Tensor:
            nonlocal last
            last = tokens
            answers.append(criteria(tokens, scores, **more))
            return answers[-1]

        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        options["stopping_criteria"] = stopping.StoppingCriteriaList([record])
        output = self.model.generate(input_ids, attention_mask=mask, **options)
        sequences = getattr(output, "sequences", output)
        lengths = range(input_ids.shape[1] + 1, sequences.shape[1] + 1)
        if len(answers) != len(lengths) or not torch.equal(last, sequences):
            # Beam search asks about other rows, pads with -1 without an end token, and a limit on the time ends all.
            lasting = [one for one in criteria if not isinstance(one, stopping.MaxTimeCriteria)]
            prefixes = (sequences[:, :length].clamp(min=0) for length in lengths)
            answers = [stopping.StoppingCriteriaList(lasting)(prefix, None) for prefix in prefixes]
        ends = torch.stack(answers, dim=1).long()
        new = ends.cumsum(1) == ends  # up to the first end
        mask = torch.cat([mask.repeat_interleave(len(sequences) // len(input_ids), 0), new.to(mask.dtype)], dim=1)
        return Generated(sequences, self.score(sequences, mask))

    def _keep_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = output[0]

    def _calibrate_output(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        hidden, self._hidden = self._hidden, None
        if hidden is None or not hasattr(output, "logits"):
            raise HeadError("the head needs a forward pass of the whole model that returns a ModelOutput.")
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments | kwargs
        logits, keep = output.logits, given.get("logits_to_keep", 0)
        rows = keep if isinstance(keep, Tensor) else slice(-keep or None, None)
        all_logits = logits
        reads_sequence = self.head.reads_sequence
        layer = self.model.get_output_embeddings()
        if reads_sequence and logits.shape[1] != hidden.shape[1] and self.head.features != ("hidden_states",):
            cap = self._export.base["logit_softcap"]
            all_logits = layer(hidden).to(torch.float32) / self._export.divisor
            if cap is not None:
                all_logits = cap * torch.tanh(all_logits / cap)
        elif not reads_sequence:
            hidden = hidden[:, rows]
        features = self._export.features(hidden, all_logits, layer.weight, self._covariance)
        mask = given.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2):  # such as a mask by kind of layer
            raise HeadError("attention_mask: expected [B, T]; a head does not support masks of other shapes.")
        past = None
        if reads_sequence:
            # Newer versions of transformers call it `cache`.
            caches = (values.get(name) for values in (output, given) for name in ("cache", "past_key_values"))
            past = self._past(next((cache for cache in caches if cache is not None), None), hidden.shape[1])
        if past is not None and mask is not None:
            mask = mask[:, : past[0].layers[past[1]].get_seq_length() + hidden.shape[1]]
        log_scale = self.head(features, mask if reads_sequence else None, past)
        log_scale = log_scale[:, rows] if reads_sequence else log_scale
        if self._calibrate:
            output.logits = scaled_logits(logits, log_scale)
        output.log_scale = log_scale
        return output

    def _past(self, cache: Any, length: int) -> Past | None:
        """The head's keys and values are one more layer of the model's cache, which beam search reorders with them."""
        if cache is None:
            return None
        layers = getattr(cache, "layers", None)
        if layers is None:
            raise HeadError(f"a transformer head needs a cache of layers, got {type(cache).__name__}; use_cache=False.")
        from transformers.cache_utils import DynamicLayer

        index = self.model.config.get_text_config().num_hidden_layers
        if len(layers) == index:
            layers.append(DynamicLayer())
            layers[index].head = self._id
        is_own = getattr(layers[index], "head", None) == self._id
        # The model's own layers hold the tokens of this pass already.
        if not is_own or layers[index].get_seq_length() + length != cache.get_seq_length():
            raise HeadError("the cache holds tokens that this head has not read. Fill one with the head attached.")
        return cache, index


def attach(model: Any, directory: str | Path, *, logits: str = "calibrated", check: bool = True) -> Attached:
    """Makes a causal language model of transformers calibrated by an exported head.

    Args:
        model: `AutoModelForCausalLM`, on one device, any dtype; with left padding, caches, `generate`, beam search.
        directory: written by `calibjax export`, or `org/name@revision` on the Hub, by `calibjax push`.
        logits: "calibrated": the model's logits become `s * logits`, in float32, so that sampling follows the
            calibrated distribution. "unchanged": they stay; `Attached.score` and `generate` give confidences.
        check: compare the hidden states of a few tokens with the model that the head was fitted on. Set it
            to False only for a model quantised after the fit.

    Returns:
        `Attached`. Outputs of the model get `log_scale` `[B, T]` in addition to their logits.

    Raises:
        HeadError: damaged files, another base model, one with a head, or a head that reads later tokens.
    """
    if logits not in ("calibrated", "unchanged"):
        raise HeadError(f'logits: expected "calibrated" or "unchanged", got {logits!r}.')
    if any(isinstance(getattr(hook, "__self__", None), Attached) for hook in model._forward_hooks.values()):
        raise HeadError("this model has a head, whose scales would be applied too: call its `detach` first.")
    export = read_export(directory)
    if export.head.pooling == "sequence":
        raise HeadError("pooling 'sequence': the temperature depends on later tokens; it cannot be used in decoding.")
    export.check_hidden_size(model.config.get_text_config().hidden_size)
    if check:
        _check_base(model, export)
    return Attached(model, export, logits == "calibrated")


@torch.no_grad()
def _check_base(model: Any, export: Export) -> None:
    weight = model.get_output_embeddings().weight
    tokens = export.probe["tokens"].long().to(weight.device)
    if model.config.get_text_config().vocab_size <= int(tokens.max()):
        raise HeadError("this head was fitted on another base model (its vocabulary is larger).")
    training = model.training
    hidden = model.eval().base_model(input_ids=tokens[None], use_cache=False)[0][0].to(torch.float32)
    model.train(training)
    expected = export.probe["hidden"].to(weight.device)
    error = float((hidden - expected).norm() / expected.norm())
    limit = 1e-3 if weight.dtype == torch.float32 else 5e-2
    if not error <= limit:
        difference = f"differ by {error:.2g} (relative; {limit:g} is allowed in {weight.dtype})"
        states = f"on a probe of {len(tokens)} tokens the hidden states {difference}"
        raise HeadError(f"this head was fitted on another base model: {states}. Fit a head for this model.")
