"""Held-out text coloured by confidence, before and after: as HTML, with the rest of each token in a script's data."""

import html
import json
from collections.abc import Mapping
from typing import Any

STEPS = 10
"""Colours of the scale; `page.css` has as many, light and dark."""


def heatmap_html(sample: Mapping[str, Any], name: str) -> str:
    """The section of one run.

    Args:
        sample: from `token_sample`.
        name: of the run, unique on the page, for ids; letters, digits and hyphens.

    Returns:
        HTML. All text of data and model is escaped.
    """
    tokens = [token for window in sample["windows"] for token in window]
    detail = [{key: token[key] for key in token if key != "scored"} if token["scored"] else None for token in tokens]
    data = json.dumps(detail, ensure_ascii=True).replace("<", "\\u003c")  # no `</script>` within the script
    blocks = "".join(
        f'<figure class="tokens" data-side="{side}"><figcaption>{title}</figcaption>{_text(sample, side)}</figure>'
        for side, title in enumerate(("As the model is", "After calibration"))
    )
    scale = "".join(f'<span class="k{k}">{_percent(k)}</span>' for k in range(STEPS))
    return (
        f'<section class="heatmap" id="{name}"><h3>Held-out text, token by token</h3>'
        "<p>Each token is coloured by how sure the model was of its most likely next token there, before it saw this "
        'one. <span class="wrong">Underlined</span>: the most likely token was another one. A paragraph is '
        "what the model read at once; what it was not asked to predict has no colour. Point at a token, or move with "
        "Tab and the arrow keys.</p>"
        f'<p class="scale" aria-hidden="true">confidence {scale}</p>'
        '<div class="detail" aria-live="polite"><p>Choose a token.</p></div>'
        f'<div class="sides">{blocks}</div><script type="application/json">{data}</script></section>'
    )


def _percent(step: int) -> str:
    return f"{100 * step // STEPS}%"


def _text(sample: Mapping[str, Any], side: int) -> str:
    parts, number, first = [], 0, True
    for window in sample["windows"]:
        parts.append("<p>")
        for token in window:
            text = _visible(token["text"])
            if token["scored"]:
                step = min(int(token["confidence"][side] * STEPS), STEPS - 1)
                wrong = "" if token["right"] else " wrong"
                # One stop for Tab in each text; the script moves it with the arrow keys.
                stop = "0" if first else "-1"
                first = False
                parts.append(f'<span class="t k{step}{wrong}" data-i="{number}" tabindex="{stop}">{text}</span>')
            else:
                parts.append(f"<span>{text}</span>")
            parts.append("<br>" if "\n" in token["text"] else "")
            number += 1
        parts.append("</p>")
    return "".join(parts)


def _visible(text: str) -> str:
    """Escaped, with line breaks as signs; nothing at all is shown as a sign too."""
    return html.escape(text.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}")) or "\N{EMPTY SET}"
