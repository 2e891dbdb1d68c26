"""Figures as PNG, as SVG, and as elements of a page."""

import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import TYPE_CHECKING

from calibjax.eval.report.markup import Content, Markup, element
from calibjax.plot import INK, LINES, MUTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def png(figure: "Figure") -> bytes:
    """The figure as PNG on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, facecolor="white")
    return buffer.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """A complete SVG document with its text as text; `name` seeds its ids, so that equal figures are equal files."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue().decode()


def inline_svg(figure: "Figure", name: str, description: str) -> Markup:
    """An element for a page: ids of its own, the colours of the page, and no reference to anything outside.

    It is rebuilt from the parsed tree of the drawing, so that no text in it can become markup. Styles become
    attributes, since the page's policy allows no inline styles.

    Args:
        figure: to be drawn.
        name: unique on the page; letters, digits and hyphens.
        description: text for screen readers.
    """
    text = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", svg(figure, name))
    root = ElementTree.fromstring(text)
    root.attrib.pop("height")
    root.attrib["width"] = f"{figure.get_figwidth() * 72:.0f}pt"
    return _svg_element(root, name, {"role": "img", "aria-label": description})


_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_LEFT_OUT = ("metadata", "style")
_PAGE_COLOURS = {INK: "currentColor", MUTED: "var(--muted)"} | {
    colour: f"var(--line{number})" for number, colour in enumerate(LINES)
}
"""Colours of a figure -> those of the page, which differ between light and dark."""


def _svg_element(node: ElementTree.Element, name: str, more: Mapping[str, str] | None = None) -> Markup:
    attributes = dict(more or {})
    for full, value in node.attrib.items():
        attribute = full.rpartition("}")[2]
        styled = _attributes_of_style(value) if attribute == "style" else {attribute: value}
        attributes |= {key: _on_page(key, text, name) for key, text in styled.items()}
    content: list[Content] = [node.text]
    for child in node:
        if child.tag.rpartition("}")[2] not in _LEFT_OUT:
            content.append(_svg_element(child, name))
        content.append(child.tail)
    return element(node.tag.rpartition("}")[2], content, **attributes)


def _attributes_of_style(style: str) -> dict[str, str]:
    """A style as presentation attributes; matplotlib 3.10 writes the font shorthand."""
    pairs = (pair.partition(":") for pair in style.split(";") if pair.strip())
    out = {key.strip(): value.strip() for key, _, value in pairs}
    font = re.fullmatch(r"(?:(italic|oblique) )?(?:([\w-]+) )?([\d.]+px) (.*)", out.pop("font", ""))
    if font:
        fields = zip(("font-style", "font-weight", "font-size", "font-family"), font.groups(), strict=True)
        out |= {key: value for key, value in fields if value}
    return out


def _on_page(attribute: str, value: str, name: str) -> str:
    if attribute == "id":
        return f"{name}-{value}"
    if attribute == "href" or value.startswith("url(#"):
        return value.replace("#", f"#{name}-", 1)
    return _PAGE_COLOURS.get(value, value)
