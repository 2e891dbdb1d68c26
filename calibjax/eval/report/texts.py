"""The part of a report on `calibjax train lhts`: the likelihood and diversity of each model's text."""

from collections.abc import Callable, Mapping
from typing import Any

from calibjax.eval.report.rows import ABSENT, TextTable
from calibjax.eval.report.schema import LhtsDocument


def findings(document: LhtsDocument) -> list[str]:
    """A sentence for each model but the pretrained one, at the first myopic temperature."""
    texts, methods = document["texts"], document["held_out"]["methods"]
    temperature = next(iter(texts["pretrained"]))
    base = texts["pretrained"][temperature]
    return [
        f"{name} at myopic temperature {temperature}: log p of a token {row[temperature]['log_prob']:.3f} against "
        f"{base['log_prob']:.3f} of the pretrained model, distinct-2 {row[temperature]['distinct_2']:.3f} against "
        f"{base['distinct_2']:.3f}; NLL of held-out text {methods[name]['nll']:.4f} against "
        f"{methods['pretrained']['nll']:.4f}."
        for name, row in texts.items()
        if name != "pretrained"
    ]


def text_table(document: LhtsDocument) -> TextTable:
    """A row for every model at every myopic temperature: likelihood and diversity of its text, accuracy, NLL."""
    texts, analogies, methods = document["texts"], document["analogies"], document["held_out"]["methods"]
    with_bleu = any(cell["self_bleu"] is not None for row in texts.values() for cell in row.values())
    columns = ["model, myopic temperature", "log p of a token", "distinct-2", "repeated 4-grams"]
    columns += ["analogies, %"] * bool(analogies) + ["distinct-1", "distinct-3"] + ["self-BLEU"] * with_bleu
    rows = []
    for name, of_model in texts.items():
        for temperature, cell in of_model.items():
            row = [f"{name}, {temperature}", f"{cell['log_prob']:.3f} ± {cell['log_prob_error']:.3f}"]
            row += [f"{cell['distinct_2']:.3f}", f"{cell['repetition']:.3f}"]
            if analogies:
                answered = analogies.get(name, {}).get(temperature)
                row.append(_percent(answered) if answered else ABSENT)
            row += [f"{cell['distinct_1']:.3f}", f"{cell['distinct_3']:.3f}"]
            if with_bleu:
                row.append(f"{cell['self_bleu']:.1f}")
            rows.append([*row, f"{methods[name]['nll']:.4f}"])
    columns.append("NLL, held-out text")
    return TextTable("text of each model, ± standard error; log p under the pretrained model, nats", columns, rows)


def tables(document: LhtsDocument) -> list[TextTable]:
    """A row for every model, a column for every myopic temperature."""
    texts = document["texts"]

    def table(title: str, results: Mapping[str, Any], show: Callable[[Mapping[str, Any]], str]) -> TextTable:
        columns = [f"myopic {temperature}" for temperature in texts["pretrained"]]
        return TextTable(
            title, ["model", *columns], [[name, *map(show, row.values())] for name, row in results.items()]
        )

    out = [
        table(
            "log p of a token under the pretrained model, nats, ± standard error over texts",
            texts,
            lambda x: f"{x['log_prob']:.3f} ± {x['log_prob_error']:.3f}",
        ),
        *(table(f"distinct-{n} of words", texts, lambda x, n=n: f"{x[f'distinct_{n}']:.3f}") for n in (1, 2, 3)),
        table("repeated 4-grams of words, fraction", texts, lambda x: f"{x['repetition']:.3f}"),
    ]
    if any(cell["self_bleu"] is not None for row in texts.values() for cell in row.values()):
        out.append(table("self-BLEU, 0 to 100", texts, lambda x: f"{x['self_bleu']:.1f}"))
    if document["analogies"]:
        out.append(
            table(
                "analogies, % correct ± standard error (chance: 25)",
                document["analogies"],
                _percent,
            )
        )
    return out


def _percent(answered: Mapping[str, Any]) -> str:
    return f"{100 * answered['accuracy']:.1f} ± {100 * answered['error']:.1f}"
