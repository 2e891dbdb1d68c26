"""Records of other tools as rows of a table: responses of servers with log-probabilities, and samples of lm-eval.

Each choice in a response of OpenAI, vLLM, SGLang, llama.cpp or Ollama becomes a row: `answer`, its number of `tokens`,
and aggregations of their probabilities p_1 ... p_n: `length_normalised` (Π p)^(1/n), `confidence` (the same),
`arithmetic_mean`, `product` and `minimum`. Where a response has several choices, its `correct` is a list.

With `per_token`, each token of a text that the server scored is a row: `logits` are the log-probabilities of the K most
likely tokens and of all others together as one more outcome; `label` is the place of the text's token. Temperature
scaling of such logits is exact only where the probability of the others is small.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from calibjax.data.source import Placed, Row, Rows
from calibjax.runtime.errors import UserError

_UNKNOWN_LOG_PROB = -9999.0  # what OpenAI writes in place of a log-probability that is not known
_PARTS = ("choices", "output", "logprobs", "completion_probabilities")  # lists in a response
_SERVER_KEYS = {"message", "logprobs", "logprob", "type", "probs"}  # of their entries, unlike the options of a question


def flat_rows(rows: Rows, *, per_token: bool = False) -> Rows:
    """The rows of a table. Records are flattened, with `per_token` to one row per token; other rows are unchanged."""
    first_row = next((row for row in rows if not _body(row).get("error")), rows.first)
    first_parts: list[Row] = []
    for name in _PARTS:
        first_parts += _records(_body(first_row).get(name))[:1]
    has_server_keys = any(_SERVER_KEYS & part.keys() for part in first_parts)
    is_sample = {"doc_id", "filtered_resps"} <= first_row.keys()
    if first_parts and ("confidence" not in first_row or has_server_keys):
        flatten: Callable[[Row], list[Row]] = _scored_tokens if per_token else _answers
    elif per_token:
        raise UserError(f"per_token: {rows.name}: expected server responses with choices, got {', '.join(first_row)}.")
    elif is_sample:
        reads_texts = all(_option_of_text(row) is not None for row in rows)  # else targets are indices
        flatten = functools.partial(_options, reads_texts)
    else:
        return rows
    has_several_choices = (len(_records(_body(row).get("choices"))) > 1 for row in rows)
    has_groups = per_token or (flatten is _answers and any(has_several_choices))

    def read() -> Iterator[Placed]:
        filters: dict[str, Any] = {}  # question of lm-eval -> the filter of its first row
        streamed: set[str] = set()  # ids of responses of which a part was read: the last part looks like a response
        for number, (place, row) in enumerate(rows.every()):
            if isinstance(row, UserError):
                yield place, row
                continue
            try:
                name = str(_body(row).get("id") or number)
                if name in streamed or _is_part(row):
                    streamed.add(name)
                    raise UserError("a part of a streamed response; save whole responses (stream=false).")
                records = flatten(row)
                if is_sample:
                    question, filter = row["doc_id"], row.get("filter")
                    first = filters.setdefault(f"{question} {row.get('doc_hash')}", filter)
                    if first != filter:
                        both = f"the filters {first} and {filter}"
                        raise UserError(f"question {question} has rows of {both}: keep one filter.")
            except UserError as error:
                yield place, UserError(f"{place}: {error}")
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                yield place, UserError(f"{place}: not a record as in the first row ({type(error).__name__}: {error}).")
            else:
                group = str(row.get("custom_id") or name)
                for record in records:
                    yield place, {"group": group, **record} if has_groups else record

    return Rows(read, name=rows.name, skip_broken=rows.skip_broken)


def with_truth(rows: Rows, truth: Rows) -> Rows:
    """Rows with the columns of a second file, such as `correct`.

    Rows are matched by `custom_id` or `id`, which may be in the response; if `truth` has neither column, by their
    order. Raises `UserError` for a repeated id, a row that `truth` lacks, and a column that both have.
    """
    name = next((name for name in ("custom_id", "id") if name in truth.first), None)
    if name is None and {"custom_id", "id"} & {column.casefold() for column in truth.first}:
        raise UserError(f"{rows.name}: {truth.name}: write the name of its column custom_id or id in small letters.")
    known: dict[str, Row] = {}
    for number, row in enumerate(truth):
        key = str(number if name is None else row.get(name))
        if key in known:
            raise UserError(f"{truth.name}: {name} {key} occurs twice; expected one row for each.")
        known[key] = row

    def joined(place: str, row: Row, number: int) -> Row | UserError:
        key = str(number if name is None else row.get(name, _body(row).get(name)))
        more = {column: value for column, value in known.get(key, {}).items() if column != name}
        if not more:
            return UserError(f"{place}: {truth.name} has no row for it ({name or 'row'} {key}); add one.")
        if in_both := more.keys() & row.keys():
            return UserError(f"{place}: the column {min(in_both)} is in {truth.name} too; remove one of them.")
        return {**row, **more}

    def read() -> Iterator[Placed]:
        count = 0
        for count, (place, row) in enumerate(rows.every(), 1):
            yield place, row if isinstance(row, UserError) else joined(place, row, count - 1)
        if name is None and count != len(known):
            raise UserError(f"{truth.name}: expected {count:,} rows, as in {rows.name}, got {len(known):,}.")

    return Rows(read, name=rows.name, skip_broken=rows.skip_broken)


class _Choice(NamedTuple):
    """An answer of a server with the reasoning before it, or a text that it scored, whose first log_prob is None."""

    text: str | None
    reasoning: str
    tokens: list[str]
    log_probs: list[float | None]
    top: list[Any]  # the most likely tokens at each place with their log-probabilities, or empty


def _body(row: Row) -> Row:
    """The response: the row itself, or what is inside the entries that batches and logs put around it."""
    for name in ("response", "body"):
        inner = row.get(name)
        if isinstance(inner, Mapping):
            row = inner
    return row


def _records(value: Any) -> list[Row]:
    return value if isinstance(value, list) and value and isinstance(value[0], Mapping) else []


def _scalars(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is None or isinstance(value, str | int | float)}


def _is_part(row: Row) -> bool:
    """Whether a row is a part of a streamed response, not the last one, of OpenAI, llama.cpp or Ollama."""
    body = _body(row)
    choices = _records(body.get("choices"))
    has_delta = any("delta" in part for part in (body, *choices))
    is_unfinished = any("text" in choice and choice.get("finish_reason", "") is None for choice in choices)
    return has_delta or is_unfinished or body.get("stop") is False or body.get("done") is False


def _read_choices(row: Row) -> list[_Choice]:
    body = _body(row)
    if error := body.get("error"):
        raise UserError(f"the server answered with an error: {str(error)[:200]}.")
    choices = _records(body.get("choices"))
    if choices:
        return [_read_choice(choice) for choice in choices]
    messages = [item for item in _records(body.get("output")) if item.get("type") != "reasoning"]
    parts = [part for item in messages for part in _records(item.get("content"))]
    if parts:  # OpenAI's Responses
        items = [item for part in parts for item in part.get("logprobs") or ()]
        if items and any(part.get("text") and not part.get("logprobs") for part in parts):
            raise UserError("a part of the response holds no log-probabilities, so those of the answer are unknown.")
        return [_from_items(items, "".join(part.get("text") or "" for part in parts), "")]
    items = _records(body.get("logprobs")) or _records(body.get("completion_probabilities"))
    message = body.get("message") or {}
    text = message.get("content") or body.get("content") or body.get("response")
    return [_from_items(items, text, message.get("thinking") or body.get("thinking") or "")]


def _read_choice(choice: Row) -> _Choice:
    logprobs = choice.get("logprobs") or {}
    message = choice.get("message") or {}
    text = message.get("content") if message else choice.get("text")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not logprobs.get("token_logprobs"):
        return _from_items(logprobs.get("content") or [], text, reasoning)
    log_probs = logprobs["token_logprobs"]
    top = logprobs.get("top_logprobs") or [None] * len(log_probs)
    return _Choice(text, reasoning, logprobs.get("tokens") or [], log_probs, top)


def _from_items(items: list[Row], text: str | None, reasoning: str) -> _Choice:
    """A choice whose tokens are objects with `token`, `logprob` and `top_logprobs`."""
    if not items:
        ask = "ask the server for them (logprobs=true, or =5); a refusal and a tool call may have none"
        raise UserError(f"the response holds no log-probabilities; {ask}.")
    tokens = []
    for item in items:
        token = item["token"]
        if item.get("bytes") is not None:  # exact also where a token is a part of a character, which "token" replaces
            token = bytes(item["bytes"]).decode(errors="surrogateescape")
        tokens.append(token)
    log_probs = [item["logprob"] for item in items]
    return _Choice(text, reasoning, tokens, log_probs, [])


def _answers(row: Row) -> list[Row]:
    choices = _read_choices(row)
    correct = row.get("correct")
    judged = len(correct) if isinstance(correct, list) else 1
    if correct is not None and judged != len(choices):
        raise UserError(f"correct: expected one value for each of {len(choices)} choices, got {judged}.")
    flat: list[Row] = []
    for number, choice in enumerate(choices):
        echoes_prompt = choice.log_probs[0] is None and bool(choice.top)
        start = _prompt_tokens(row, choices) if echoes_prompt else _reasoning_tokens(choice)
        log_probs = [_checked_log_prob(value, place) for place, value in enumerate(choice.log_probs) if place >= start]
        if not log_probs:
            raise UserError("expected an answer of at least one token, got none; remove the row.")
        answer = {"answer": choice.text, "tokens": len(log_probs), **aggregated(log_probs), **_scalars(row)}
        if isinstance(correct, list):
            answer["correct"] = correct[number]
        flat.append(answer)
    return flat


def _checked_log_prob(value: float | None, place: int) -> float:
    if value is None or not _UNKNOWN_LOG_PROB < value <= 1e-3:
        raise UserError(f"token {place}: expected a log-probability, got {value}: the answer's is unknown.")
    return min(float(value), 0.0)


def _reasoning_tokens(choice: _Choice) -> int:
    """The number of tokens before the answer, if the server counts those of the reasoning."""
    # Servers without a parser of reasoning leave it in the text.
    _, end, answer = (choice.text or "").strip().rpartition("</think>")
    is_cut = answer.startswith("<think>")  # the reasoning was not finished
    if not (choice.reasoning or end or is_cut):
        return 0
    answer = "" if is_cut else answer.strip()
    tail = ""
    for place in reversed(range(len(choice.tokens))):
        tail = choice.tokens[place] + tail
        readable = tail.encode(errors="surrogateescape").decode(errors="replace")
        if answer and readable.lstrip().startswith(answer):
            return place
    raise UserError("the tokens do not hold the answer, so its tokens cannot be told from those of the reasoning.")


def aggregated(log_probs: list[float]) -> dict[str, float]:
    """Confidences in an answer of n tokens from their log-probabilities; see `answer_confidence`."""
    total = math.fsum(log_probs)
    length_normalised = math.exp(total / len(log_probs))
    return {
        "confidence": length_normalised,
        "length_normalised": length_normalised,
        "arithmetic_mean": math.fsum(map(math.exp, log_probs)) / len(log_probs),
        "product": math.exp(total),
        "minimum": math.exp(min(log_probs)),
    }


def _prompt_tokens(row: Row, texts: list[_Choice]) -> int:
    count = (_body(row).get("usage") or {}).get("prompt_tokens")
    if count is None:
        raise UserError("the response echoes its prompt, but usage.prompt_tokens, its length, is missing.")
    if len({tuple(text.tokens[:count]) for text in texts}) > 1:
        raise UserError("usage.prompt_tokens is of several prompts; send one in each request.")
    return int(count)


def _scored_tokens(row: Row) -> list[Row]:
    choices = _records(_body(row).get("choices"))
    prompts = [record for record in (_body(row), *choices) if record.get("prompt_logprobs")]
    if prompts:
        texts = [_from_prompt(record["prompt_logprobs"], record.get("prompt_token_ids")) for record in prompts]
        ends = [len(text.tokens) for text in texts]
    else:
        texts = _read_choices(row)
        ends = [_prompt_tokens(row, texts) for text in texts if text.log_probs[0] is None]
    if len(ends) < len(texts) or not all(any(text.top) for text in texts):
        scored = "expected a text that the server scored (echo=true, logprobs=5; or prompt_logprobs=5)"
        raise UserError(f"per_token: {scored}: of tokens that a model wrote itself, nothing says which were right.")
    flat = itertools.chain.from_iterable(map(_token_rows, texts, ends))
    return [{**token_row, **_scalars(row)} for token_row in flat]


def _from_prompt(places: list[Any], ids: list[int] | None) -> _Choice:
    """vLLM's `prompt_logprobs`: at each place, token id -> log-probability and rank; the text's own token is first."""
    tokens = ["the first"]
    log_probs: list[float | None] = [None]
    top: list[Any] = [None]
    for number, listed in enumerate(places[1:], 1):
        token = str(ids[number]) if ids else next(iter(listed))
        most_likely = {name: item["logprob"] for name, item in listed.items() if item["rank"] <= len(listed)}
        if not listed.keys() - {token} <= most_likely.keys():
            raise UserError(f"prompt_logprobs: place {number}: the order of the keys has changed; save it as it was.")
        tokens.append(token)
        log_probs.append(listed[token]["logprob"])
        top.append(most_likely)
    return _Choice(None, "", tokens, log_probs, top)


def _token_rows(text: _Choice, end: int) -> Iterator[Row]:
    """A row for each token but the first, up to `end`, where the answer begins."""
    fewest = min(len(top or ()) for top in text.top[1:end])
    for place in range(1, end):
        # A server may list the text's own token beyond the K most likely ones: there it belongs to the others.
        ranked = sorted((text.top[place] or {}).items(), key=lambda item: -item[1])[:fewest]
        names = [name for name, _ in ranked]
        logits = [float(value) for _, value in ranked]
        others = 1.0 - math.fsum(map(math.exp, logits))  # their probability
        logits.append(math.log(max(others, 1e-12)))
        token = text.tokens[place]
        label = names.index(token) if token in names else len(names)
        yield {"token": token, "logits": logits, "label": label}


def _option_of_text(row: Row) -> int | None:
    """The index of the option that is the target of a sample of lm-eval; `arguments` holds pairs (prompt, option)."""
    pairs = row.get("arguments")
    if isinstance(pairs, Mapping):
        pairs = [list(pair.values()) for pair in pairs.values() if isinstance(pair, Mapping)]
    if not isinstance(pairs, list):
        return None
    options = [str(pair[1]).strip() for pair in pairs if isinstance(pair, list) and len(pair) > 1]
    target = str(row.get("target", "")).strip()
    if len(set(options)) < 2 or target not in options:  # with equal options the prompts differ
        return None
    return options.index(target)


def _options(reads_texts: bool, row: Row) -> list[Row]:
    """A row from a sample of lm-eval, whose numbers may be text: log-likelihoods of the options, and the right one.

    `reads_texts`: whether the target is the text of an option, not its index.
    """
    answers = row["filtered_resps"]
    if len(answers) < 2 or not all(isinstance(answer, list) and len(answer) == 2 for answer in answers):
        raise UserError("expected log-likelihoods of options in filtered_resps; a written or a single answer has none.")
    if "acc_mutual_info" in row:
        answers = answers[: len(answers) // 2]  # the others are those without the question
    logits = [float(log_likelihood) for log_likelihood, _ in answers]
    largest = max(logits)
    chosen = logits.index(largest)
    confidence = 1 / math.fsum(math.exp(value - largest) for value in logits)
    flat = {"confidence": confidence, "logits": logits}
    correct = row.get("acc")
    if correct is not None:
        flat["correct"] = float(correct)
    target = str(row.get("target", "")).strip()
    label = None
    if reads_texts:
        label = _option_of_text(row)
    elif target.isdecimal():
        label = int(target)
    if label is not None and label < len(logits):
        if correct is not None and (label == chosen) != float(correct):
            raise UserError(f"target {target} and acc {correct} disagree: is acc of another choice?")
        flat["label"] = label
    return [{**_scalars(row), **flat}]
