"""Records of other tools as rows of a table: responses of OpenAI-compatible servers, and samples of lm-eval.

vLLM, SGLang, llama.cpp and Ollama answer with log-probabilities of tokens, of chats (`choices[].logprobs.content[]`) or
of completions (`choices[].logprobs.token_logprobs`). Each choice is a row: `answer`, its number of `tokens`, and a
confidence by every aggregation of the tokens' probabilities p_1 ... p_n: `length_normalised` (Π p)^(1/n), which is
`confidence` too, `arithmetic_mean`, `product` and `minimum`. What was right is a column `correct` beside them, a list
where a response has several choices.

With `tokens`, each token of a text that the server echoed is a row: `logits` are the log-probabilities of the K most
likely tokens, from the first, and of all others together as one more outcome; `label` is the place of the text's token.
Temperature scaling of such logits takes the others for one token: it is exact only where their probability is small.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from calibjax.data.source import Placed, Row, Rows
from calibjax.runtime.errors import UserError


def flat_rows(rows: Rows, *, tokens: bool = False) -> Rows:
    """Rows of a table; those of records are flat, and others are as they are.

    Args:
        rows: result of `read_source`.
        tokens: of responses with an echoed text, a row for each token.

    Raises:
        UserError: `tokens` of rows that are no responses; while iterating, a record without log-probabilities.
    """
    first = rows.first
    if _choices(first) is not None:
        flatten: Callable[[Row], list[Row]] = _tokens if tokens else _answers
    elif tokens:
        raise UserError(f"{rows.name}: --tokens: expected responses of a server with choices, got {', '.join(first)}.")
    elif "doc_id" in first and "filtered_resps" in first:
        flatten = _options
    else:
        return rows

    def read() -> Iterator[Placed]:
        for number, (place, row) in enumerate(rows.placed()):
            try:
                flat = flatten(row)
            except UserError as error:
                yield place, UserError(f"{place}: {error}")
                continue
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                yield place, UserError(f"{place}: not a record as in the first row ({type(error).__name__}: {error}).")
                continue
            for one in flat:
                yield place, one if len(flat) == 1 else {"group": _name(row, number), **one}

    return Rows(read, name=rows.name, skip_broken=rows.skip_broken)


def _body(row: Row) -> Mapping[str, Any]:
    """The response: the row itself, or what batches and logs put around it."""
    for name in ("response", "body"):
        inner = row.get(name)
        row = inner if isinstance(inner, Mapping) else row
    return row


def _choices(row: Row) -> list[Any] | None:
    choices = _body(row).get("choices")
    return choices if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else None


def _name(row: Row, number: int) -> str:
    return str(row.get("custom_id") or _body(row).get("id") or number)


def _scalars(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is None or isinstance(value, str | int | float)}


def _choices_with_logprobs(row: Row) -> list[tuple[Any, Mapping[str, Any]]]:
    found = [(choice, choice.get("logprobs")) for choice in _choices(row) or ()]
    if not found or not all(isinstance(held, Mapping) for _, held in found):
        raise UserError("the response holds no log-probabilities; ask the server for them (logprobs=true, or =5).")
    return found


def _answers(row: Row) -> list[Row]:
    several = _choices_with_logprobs(row)
    correct = row.get("correct")
    if isinstance(correct, list) and len(correct) != len(several):
        raise UserError(f"correct: expected one value for each of {len(several)} choices, got {len(correct)}.")
    flat = []
    for number, (choice, held) in enumerate(several):
        if held.get("content") is not None:
            log_probs = [item["logprob"] for item in held["content"]]
            text = (choice.get("message") or {}).get("content")
        else:
            log_probs = list(held["token_logprobs"])
            log_probs = log_probs[_prompt_tokens(row) if None in log_probs[:1] else 0 :]
            text = choice.get("text")
        if not log_probs:
            raise UserError("the answer has no tokens.")
        answer = {"answer": text, "tokens": len(log_probs), **aggregated(log_probs)}
        of_choice = {"correct": correct[number]} if isinstance(correct, list) else {}
        flat.append({**answer, **_scalars(row), **of_choice})
    return flat


def aggregated(log_probs: list[float]) -> dict[str, float]:
    """Confidences in an answer of n tokens from their log-probabilities; see `answer_confidence`."""
    values = [min(float(value), 0.0) for value in log_probs]
    total = math.fsum(values)
    normalised = math.exp(total / len(values))
    return {
        "confidence": normalised,
        "length_normalised": normalised,
        "arithmetic_mean": math.fsum(map(math.exp, values)) / len(values),
        "product": math.exp(total),
        "minimum": math.exp(min(values)),
    }


def _prompt_tokens(row: Row) -> int:
    usage = _body(row).get("usage") or {}
    if "prompt_tokens" not in usage:
        raise UserError(
            "the response echoes its prompt, and usage.prompt_tokens, which says how long it is, is missing."
        )
    return int(usage["prompt_tokens"])


def _tokens(row: Row) -> list[Row]:
    flat: list[Row] = []
    for _, held in _choices_with_logprobs(row):
        log_probs, most = held.get("token_logprobs") or [0.0], held.get("top_logprobs")
        if log_probs[0] is not None or not most:
            raise UserError(
                "--tokens: expected a completion that echoes its text (echo=true, logprobs=5): of tokens that a model "
                "wrote itself, nothing says which were right."
            )
        end = _prompt_tokens(row)
        fewest = min(len(top) for top in most[1:end])
        for place in range(1, end):
            token = held["tokens"][place]
            # A server lists the text's own token beside the K most likely ones: it belongs to the others.
            ranked = sorted(most[place].items(), key=lambda item: -item[1])[:fewest]
            names = [name for name, _ in ranked]
            others = 1.0 - math.fsum(math.exp(value) for _, value in ranked)
            logits = [float(value) for _, value in ranked] + [math.log(max(others, 1e-12))]
            label = names.index(token) if token in names else len(names)
            flat.append({"token": token, "logits": logits, "label": label, **_scalars(row)})
    return flat


def _options(row: Row) -> list[Row]:
    """A sample of lm-eval, whose numbers may be text: log-likelihoods of the options, and the right one."""
    answers = row["filtered_resps"]
    if not answers or not all(isinstance(answer, list) and len(answer) == 2 for answer in answers):
        raise UserError("expected log-likelihoods of options in filtered_resps; a written answer has none.")
    logits = [float(log_likelihood) for log_likelihood, _ in answers]
    chosen, most = logits.index(max(logits)), max(logits)
    confidence = 1 / math.fsum(math.exp(value - most) for value in logits)
    flat = {"confidence": confidence, "logits": logits}
    target = str(row.get("target", ""))
    correct = row.get("acc")
    if correct is not None:
        flat["correct"] = float(correct)
    if target.isdecimal() and int(target) < len(logits):
        if correct is not None and (int(target) == chosen) != (float(correct) == 1):
            raise UserError(f"target {target} and acc {correct} disagree: is acc of another choice?")
        flat["label"] = int(target)
    return [{**_scalars(row), **flat}]
