"""Held-out text coloured by confidence, before and after calibration; further figures of each token as data."""

import math

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
    blocks = (
        element("figure", element("figcaption", title), _text(sample, side), class_="tokens", data_side=side)
        for side, title in enumerate(("Base model", "After calibration"))
    )
    scale = (element("span", f"{100 * step // STEPS}%", class_=f"k{step}") for step in range(STEPS))
    return element(
        "section",
        element("h3", "Held-out text, token by token"),
        element(
            "p",
            "The colour of a token is the model's confidence in its most likely token at that position. ",
            element("span", "Underlined", class_="wrong"),
            ": the most likely token was a different one. Each paragraph is one sequence; tokens that are not "
            "predicted have no colour. Point at a token, or move with Tab and the arrow keys.",
        ),
        element("p", "confidence ", scale, class_="scale", aria_hidden="true"),
        element("div", element("p", "Choose a token."), class_="detail", aria_live="polite"),
        element("div", blocks, class_="sides"),
        data_script(detail),
        class_="heatmap",
        id=name,
    )


def _text(sample: TokenSample, side: int) -> list[Markup]:
    paragraphs, number, first = [], 0, True
    for sequence in sample["windows"]:
        parts: list[Content] = []
        for token in sequence:
            text = _visible(token["text"])
            if token["scored"]:
                # One tab stop in each text; the script moves it with the arrow keys.
                stop = 0 if first else -1
                first = False
                parts.append(element("span", text, class_=_class(token, side), data_i=number, tabindex=stop))
            else:
                parts.append(element("span", text))
            if "\n" in token["text"]:
                parts.append(element("br"))
            number += 1
        paragraphs.append(element("p", parts))
    return paragraphs


def _class(token: Token, side: int) -> str:
    """The token's colour class, none if its confidence is not finite, and `wrong` if it was not the most likely one."""
    confidence = token["confidence"][side] if "confidence" in token else math.nan
    step = []
    if math.isfinite(confidence):
        step.append(f"k{min(max(int(confidence * STEPS), 0), STEPS - 1)}")
    return " ".join(["t", *step, *([] if token.get("right") else ["wrong"])])


def _visible(text: str) -> str:
    """The text with line breaks and the empty text as symbols."""
    return text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}") or "\N{EMPTY SET}"
