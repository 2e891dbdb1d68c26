"""Held-out text coloured by confidence, before and after calibration; further figures of each token as data."""

import math
from collections.abc import Sequence

from calibjax.eval.report.markup import Content, Markup, data_script, element
from calibjax.eval.report.schema import Token, TokenSample

STEPS = 10
"""Colours of the scale; `page.css` has as many, light and dark."""


def heatmap_html(sample: TokenSample, name: str) -> Markup:
    """The section of one run.

    Args:
        sample: from `token_sample`.
        name: of the run, unique on the page, for ids; letters, digits and hyphens.

    Returns:
        An element.
    """
    tokens = [token for sequence in sample["windows"] for token in sequence]
    detail = [{key: token[key] for key in token if key != "scored"} if token["scored"] else None for token in tokens]
    scale = (element("span", f"{100 * step // STEPS}%", class_=f"k{step}") for step in range(STEPS))
    pairs, number = [], 0
    for place, sequence in enumerate(sample["windows"]):
        sides = (
            element("figure", element("figcaption", title), _text(sequence, side, number), class_="tokens")
            for side, title in enumerate(("Base model", "After calibration"))
        )
        heading = element("h4", f"Sample {place + 1}") if len(sample["windows"]) > 1 else None
        pairs.append(element("div", heading, element("div", sides, class_="sides")))
        number += len(sequence)
    return element(
        "section",
        element("h3", "Held-out text, token by token"),
        element(
            "p",
            "The colour of a token is the model's confidence in its most likely token at that position. ",
            element("span", "Underlined", class_="wrong"),
            ": the most likely token was a different one; ",
            element("span", "with a bar", class_="wrong bold"),
            ": with a confidence above one half. Tokens that are not predicted have no colour. Point at a token, tap "
            "it, or move with Tab and the arrow keys.",
        ),
        element("p", "confidence ", scale, class_="scale", aria_hidden="true"),
        element("div", element("p", "Choose a token."), class_="detail", aria_live="polite"),
        pairs,
        data_script(detail),
        class_="heatmap",
        id=name,
    )


def _text(sequence: Sequence[Token], side: int, number: int) -> Markup:
    """A text whose first token has the given number."""
    parts: list[Content] = []
    stop = 0  # one tab stop in each text; the script moves it with the arrow keys
    for place, token in enumerate(sequence):
        text = _visible(token["text"])
        if token["scored"]:
            parts.append(element("span", text, class_=_class(token, side), data_i=number + place, tabindex=stop))
            stop = -1
        else:
            parts.append(element("span", text))
        if "\n" in token["text"]:
            parts.append(element("br"))
    return element("p", parts)


def _class(token: Token, side: int) -> str:
    """The token's colour class, none if its confidence is not finite, and whether it was wrong."""
    confidence = token["confidence"][side] if "confidence" in token else math.nan
    step = []
    if math.isfinite(confidence):
        step.append(f"k{min(max(int(confidence * STEPS), 0), STEPS - 1)}")
    wrong = [] if token.get("right") else ["wrong", *(["bold"] if confidence > 0.5 else [])]
    return " ".join(["t", *step, *wrong])


def _visible(text: str) -> str:
    """The text with line breaks and the empty text as symbols."""
    return text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}") or "\N{EMPTY SET}"
