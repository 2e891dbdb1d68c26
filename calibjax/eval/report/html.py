"""The only module that makes HTML: the content of an element is escaped, and no data can become code.

Elements, the page around them, and drawings of matplotlib as elements of the page.
"""

import base64
import hashlib
import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from calibjax.plot import INK, LINES, MUTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Content = str | Iterable["Content"] | None
"""Text, which is escaped; `Markup`, which is not; or any number of both."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9:-]*")
_CODE = re.compile(r"on|style$", re.IGNORECASE)  # attributes that hold script or style
_RAW = ("script", "style")  # their content cannot be escaped
_VOID = ("br", "link", "meta")
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def element(kind: str, *content: Content, **attributes: str | int | None) -> Markup:
    """An element; in names of attributes `_` stands for `-`, a trailing one is dropped, and a value of None is absent.

    Raises:
        ValueError: an invalid name of an element or attribute, or one that would hold code.
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    if not all(map(_NAME.fullmatch, (kind, *given))) or kind in _RAW or any(map(_CODE.match, given)):
        raise ValueError(f"not an element that can be filled with data: {kind} with {', '.join(given) or 'nothing'}.")
    return _element(kind, joined(content), given)


def joined(content: Content, separator: str = "") -> Markup:
    """Joins content; text is escaped, markup is unchanged."""
    if content is None:
        return Markup("")
    if isinstance(content, str):
        return escape(content)
    return Markup(separator).join(map(joined, content))


def _element(kind: str, content: Markup, attributes: dict[str, Any]) -> Markup:
    listed = Markup("").join(Markup(' {}="{}"').format(name, value) for name, value in attributes.items())
    start = Markup("<{}{}>").format(kind, listed)
    return start if kind in _VOID else start + content + Markup("</{}>").format(kind)


def data_script(value: Any) -> Markup:
    """A script element of JSON data. Numbers that are not finite become null; no text in it can end the element."""
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False).translate(_UNSAFE)
    return _element("script", Markup(text), {"type": "application/json"})


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def document(title: str, body: Content, style: str, script: str | None) -> str:
    """A page that loads nothing and runs only `script`: a content security policy names style and script by hash."""
    policy = {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": _hash(style),
        "script-src": "'none'" if script is None else _hash(script),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    head = element(
        "head",
        element("meta", charset="utf-8"),
        # Before everything that it applies to.
        element(
            "meta",
            http_equiv="Content-Security-Policy",
            content="; ".join(f"{name} {value}" for name, value in policy.items()),
        ),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),  # or a browser requests one
        element("title", title),
        _element("style", Markup(style), {}),
    )
    end = None if script is None else _element("script", Markup(script), {})
    page = element("html", head, "\n", element("body", "\n", body, end, "\n"), "\n", lang="en")
    return f"{Markup('<!doctype html>')}\n{page}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- drawings ---


def svg(figure: "Figure", name: str) -> str:
    """A complete SVG document with its text as text; `name` seeds its ids, so that equal figures are equal files."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue().decode()


def inline_svg(figure: "Figure", name: str, description: str) -> Markup:
    """An element for a page: ids that begin with `name`, the colours of the page, and no reference to anything outside.

    It is rebuilt from the parsed tree of the drawing, so that no text in it can become markup. Styles become
    attributes, since the page's policy allows no inline styles.
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
