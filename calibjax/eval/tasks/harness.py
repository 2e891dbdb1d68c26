"""A calibjax model behind the interface of EleutherAI's lm-eval: log-likelihoods and generated text."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.utils import _add_special_kwargs, has_bos_prefix, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from calibjax.data.chat_template import render_chat
from calibjax.eval.tasks.continuation import continue_contexts, room_for_context
from calibjax.eval.tasks.scoring import Continuation, Scorer
from calibjax.heads import FittedHead
from calibjax.models import LanguageModel
from calibjax.models.generate import Sampling
from calibjax.runtime.errors import UserError
from calibjax.runtime.progress import progress_bar


class Chat(NamedTuple):
    """Prompts are messages in the model's chat template, with examples as turns of their own, as by the harness's
    `--apply_chat_template`; `system` is the text of a system message before the description of a task."""

    system: str | None = None


class HarnessLM(TemplateLM):
    """A model and its heads for lm-eval, which receives the results of the first head only.

    Log-likelihoods are calibrated, log softmax(s_t z_t). An interrupted run resumes from the harness's cache.

    Args:
        batch_size, max_length: as in `Scorer`.
        max_gen_toks: largest number of generated tokens, where a task gives none.
        seed: seed of the samples that tasks request.
        chat: how prompts become messages; if None, they are plain text.
    """

    def __init__(
        self,
        lm: LanguageModel,
        heads: Mapping[str, FittedHead],
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        chat: Chat | None = None,
    ):
        super().__init__()
        self.chat = chat
        self.lm, self.heads, self.max_gen_toks, self._key = lm, dict(heads), max_gen_toks, jax.random.key(seed)
        self.tokenizer: Any = lm.tokenizer
        self.scorer = Scorer(lm, heads, batch_size=batch_size, max_length=max_length)
        self._encoded: dict[str, list[int]] = {}

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the tokenizer's first token, or else its last."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    @property
    def max_length(self) -> int:
        return self.scorer.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and string in self._encoded:
            return self._encoded[string]
        options = _add_special_kwargs(add_special_tokens)
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            options["add_special_tokens"] = False
        return self.tokenizer.encode(string, verbose=False, **options)

    @functools.cached_property
    def word_end(self) -> str:
        """What stands between the last word of a prompt and the text to write: " " where a token holds the space after
        a word and not that before it. Without it, such a model would continue the word itself."""
        adds_token = len(self.tok_encode("the ")) > len(self.tok_encode("the"))
        return "" if self.chat is not None or adds_token else " "

    def encode(self, context: str, continuation: str) -> Continuation:
        """Splits a request as the harness does: spaces at the end of the context belong to the continuation."""
        if context:
            return Continuation(*self._encode_pair(context, continuation))
        tokens = self.tok_encode(continuation, add_special_tokens=False)
        first = self.prefix_token_id
        return Continuation(tokens[:1], tokens[1:]) if tokens[:1] == [first] else Continuation([first], tokens)

    def prompt(self, task: ConfigurableTask, document: Any, shots: int) -> Any:
        """The harness's prompt of a question; a list of prompts where the options are in it."""
        chat: dict[str, Any] = {}
        if self.chat is not None:
            chat = {"system_instruction": self.chat.system, "chat_template": self.apply_chat_template}
            chat |= {"apply_chat_template": True, "fewshot_as_multiturn": True}
        return task.fewshot_context(document, num_fewshot=shots, gen_prefix=task.doc_to_prefix(document), **chat)

    def message(self, text: str) -> str:
        if self.chat is None:
            return text
        system = [{"role": "system", "content": self.chat.system}] if self.chat.system else []
        return self.apply_chat_template([*system, {"role": "user", "content": text}])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As the harness's; each text is encoded once, all in one call, which uses all cores."""
        arguments: list[Any] = [request.args for request in requests]
        texts = dict.fromkeys(
            text for context, continuation in arguments for text in (context.rstrip(), context + continuation)
        )
        first = self.tokenizer.decode(self.prefix_token_id)
        plain = [text for text in texts if text and not has_bos_prefix(text, first)]
        ids = self.tokenizer(plain, verbose=False)["input_ids"] if plain else []
        self._encoded = dict(zip(plain, ids, strict=True))
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._encoded = {}

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        answers: dict[int, tuple[float, bool]] = {}
        stream = self.scorer.stream([Continuation(context, tokens) for _, context, tokens in requests])
        bar = progress_bar(stream, title="log-likelihoods", unit="request", disable=disable_tqdm, total=len(requests))
        for number, score in bar:
            answers[number] = (float(score.log_probs[0].sum()), bool(score.greedy.all()))
            if requests[number][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
        return [answers[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts: each token is predicted once, in the harness's rolling windows."""
        totals = []
        for request in progress_bar(requests, title="rolling log-likelihoods", unit="request", disable=disable_tqdm):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            scores = self.scorer.score([Continuation(*make_disjoint_window(window)) for window in windows])
            totals.append(float(sum(score.log_probs[0].sum() for score in scores)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates text up to a stop sequence: greedily, or by sampling if the task requests it."""
        arguments: list[Any] = [request.args for request in requests]
        answers: dict[int, str] = {}
        bar = progress_bar(None, title="generating", unit="request", disable=disable_tqdm, total=len(requests))
        groups: dict[str, list[int]] = {}
        for number, (_, options) in enumerate(arguments):
            groups.setdefault(repr(options), []).append(number)
        for numbers in groups.values():
            options = self.generation_options(arguments[numbers[0]][1])
            room = room_for_context(options["max_new_tokens"], self.max_length)
            contexts = [self.tok_encode(arguments[number][0])[-room:] for number in numbers]
            for place, continued in continue_contexts(self.lm, contexts, **options):
                number = numbers[place]
                answers[number] = continued.text
                self.cache_hook.add_partial("generate_until", arguments[number], continued.text)
                bar.update()
        bar.close()
        return [answers[number] for number in range(len(requests))]

    def generation_options(self, generation_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `continue_contexts` for the generation_kwargs of a task."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(generation_kwargs, self.max_gen_toks))
        samples = options.pop("do_sample") and options["temperature"] > 0
        arguments = {
            "until": [*options.pop("until"), self.tokenizer.decode([self.eot_token_id])],
            "max_new_tokens": options.pop("max_gen_toks"),
            "batch_size": self.scorer.batch_size,
        }
        if not samples:
            return arguments
        temperature = float(options.pop("temperature"))
        top_k, top_p = options.pop("top_k", None), options.pop("top_p", None)
        if options:
            raise UserError(f"generation_kwargs: {', '.join(options)}: not taken; leave them out.")
        return {**arguments, "sampling": Sampling(temperature=temperature, top_k=top_k, top_p=top_p, key=self._key)}
