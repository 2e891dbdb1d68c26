"""What strangers wrote into metrics.json and tokens.json is text on the page, whatever it is; a browser runs none."""

import ast
import base64
import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_documents import document, sample

import calibjax.eval.report
from calibjax.eval.report import page as page_of
from calibjax.eval.report.figures import Drawing, Panel, figures_of
from calibjax.eval.report.notes import verdict
from calibjax.eval.report.page import Run, page, save_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAYLOADS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    "</style></title><svg onload=alert(1)>",
    "{{alert(1)}}",
    "' onx=alert(1) y='",
    '" onmouseover="alert(1)" style="position:fixed',
    "--><!--<script>]]>",
    "&lt;b&gt;\u2028\u2029\x01\ufffe",
)


class Parsed(HTMLParser):
    """The elements of a page with the names of their attributes, its text, and what is in every script and style."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.raw, self.policy, self._path = [], "", [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        values = dict(attrs)
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        self.text += values.get("alt", "")
        if tag not in ("meta", "link", "br", "img"):
            self._path.append(tag)
        if tag in ("script", "style"):
            self.raw.append("")

    def handle_endtag(self, tag):
        assert self._path.pop() == tag, "elements are nested"

    def handle_data(self, data):
        if self._path and self._path[-1] in ("script", "style"):
            self.raw[-1] += data
        else:
            self.text += data


def runs(named):
    whole = document(named)
    for results, count in ((*whole["transfer"].values(), 2), (whole["tasks"][named("other")], 1)):  # each is drawn
        results["methods"] = dict(list(results["methods"].items())[-count:])
    small = {name: whole[name] for name in ("schema", "held_out", "run")}
    methods = list(whole["held_out"]["methods"].items())
    small["held_out"] = whole["held_out"] | {"methods": dict([*methods[:2], methods[-1]])}
    return [Run(named("one"), whole, sample(named)), Run(named("two"), small, sample(named))]


@pytest.fixture(scope="module")
def benign():
    return page(runs(str))


@pytest.fixture(scope="module")
def clean(benign):
    return Parsed(benign)


@pytest.fixture(scope="module")
def hostile():
    made = runs(lambda name: name + "".join(PAYLOADS))
    made[0].tokens["sequences"][0][1] |= {"temperature": math.nan, "entropy": [math.nan, 1.0]}
    return page(made)


def test_every_string_is_text(clean, hostile):
    payload, hostile = "".join(PAYLOADS), Parsed(hostile)
    assert (hostile.elements, hostile.policy) == (clean.elements, clean.policy)
    for word in ("sequences", "task", "one", "law", "beta", "a file", "domain", "mine"):
        assert word + payload in hostile.text, word
    data = json.loads(hostile.raw[1])
    assert data[1]["text"] == " word" + payload
    assert data[1]["top"][0][0] == " word" + payload


def test_a_page_is_self_contained(benign):
    assert not re.search(r"""https?://|//\w+\.\w+/|@import|url\(|(src|href)="(?!data:)""", benign)
    names = re.findall(r'\sid="([^"]*)"', benign)
    assert len(names) == len(set(names))
    whole = document()
    verdicts = re.findall(r'<p class="verdict[^>]*>(.*?)</p>', benign)
    assert verdicts[0].endswith(str(verdict(whole))), "it stands first"
    for row in whole["held_out"]["methods"].values():
        ece = row["ece"]
        for figure in (f">{row['nll']:.4f}<", f">{ece['value']:.4f}<", f"[{ece['low']:.4f}, {ece['high']:.4f}]"):
            assert figure in benign


def test_runs_have_their_own_conventions(clean):
    one, two = runs(str)[0], runs(str)[1]
    (line,) = page_of.conventions_of([one, two])
    assert line in clean.text
    two.document["held_out"]["unit"] = "questions"
    assert page_of.conventions_of([one, two])[0] == f"one: {line}"


def test_tokens_are_coloured_by_their_confidence(benign):
    section = benign[benign.index('<section class="heatmap"') :].partition("</section>")[0]
    assert re.findall(r'class="t (k\d[ a-z]*)"', section) == ["k9 wrong bold", "k9", "k1 wrong", "k1"]
    assert section.count('tabindex="0"') == 2, "one stop for Tab in each text"


def test_names_are_no_formulas():
    """Of matplotlib, which reads $...$ as mathematics and raises where it is none."""
    formula = "$\\frac$" + "".join(PAYLOADS)
    drawings = {drawing.name: drawing for drawing in figures_of(document(lambda name: formula + name))}
    titles = Drawing("titles", formula, [Panel(formula, formula, lambda ax: None, 1, 1)])
    for drawing in (titles, drawings["subjects"], drawings["diversity"]):
        assert page_of.svg(drawing.figure(), drawing.name)


def test_files_stay_in_the_directory(tmp_path, undrawn):
    """Figures are named after tasks."""
    out = tmp_path / "a" / "out"
    out.mkdir(parents=True)
    hostile = document(lambda name: f"../../{name}/<script>")
    hostile["held_out"]["methods"] = dict(list(hostile["held_out"]["methods"].items())[:2])
    files = save_report([Run("", {name: hostile[name] for name in ("held_out", "tasks")})], out)
    assert {entry.name for entry in out.iterdir()} == set(files)
    assert {"subjects-0.svg", "subjects-1.png"} <= set(files)
    assert sorted(tmp_path.rglob("*.*")) == sorted(out.iterdir())


def test_the_policy_names_all_that_runs(clean):
    policy = dict(part.split(" ", 1) for part in clean.policy.split("; "))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in clean.policy
    style, *data, script = clean.raw
    for directive, text in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert (len(data), policy["img-src"]) == (2, "data:")
    assert not any("style" in names for _, names in clean.elements), "no policy with a hash allows it"


def test_a_lone_surrogate_is_replaced():
    run = runs(str)[1]
    run.document["run"] = {"model": "a\ud800b"}
    assert "a?b" in page([run])


def test_numbers_that_are_not_finite():
    tokens = sample()
    for token in tokens["sequences"][0][1:]:
        token |= {name: [math.nan, math.inf] for name in ("confidence", "probability", "entropy")}
        token |= {"temperature": -math.inf, "top": [["x", math.nan, 0.5]]}
    parsed = Parsed(page([runs(str)[1]._replace(tokens=json.loads(json.dumps(tokens)))]))

    def refused(word):
        raise AssertionError(f"{word} is not JSON")

    data = json.loads(parsed.raw[1], parse_constant=refused)
    assert data[1]["confidence"] == [None, None]
    assert data[1]["temperature"] is None
    assert data[1]["top"] == [["x", None, 0.5]]


def test_markup_is_made_in_one_place():
    """Of the package by page.py alone, which never calls data safe; its template says of nothing that it is safe."""
    folder = Path(calibjax.eval.report.__file__).parent
    for file in folder.glob("*.py"):
        names = {getattr(node, "id", "") for node in ast.walk(ast.parse(file.read_text()))}
        assert file.name == "page.py" or "Markup" not in names, file.name
    assert not re.search(r"safe|autoescape|\|\s*(xmlattr|tojson)", (folder / "page.html").read_text())


@pytest.fixture(scope="module")
def visit():
    """A function that opens a page of a file: the tab, and what it requested, logged and showed in dialogs."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")

    def visit(file, text, **options):
        urls, logs, ran = [], [], []
        file.write_text(text, encoding="utf-8")
        tab = started.new_page(**options)
        tab.on("request", lambda request: urls.append(request.url))
        tab.on("console", lambda message: logs.append(message.text))
        tab.on("pageerror", lambda error: logs.append(str(error)))
        tab.on("dialog", lambda dialog: (ran.append(dialog.message), dialog.dismiss()))
        tab.goto(file.as_uri())
        return tab, urls, logs, ran

    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield visit
        started.close()


def test_nothing_runs_in_a_browser(tmp_path, hostile, visit):
    tab, urls, logs, ran = visit(tmp_path / "report.html", hostile)
    for token in tab.locator(".t").all():
        token.hover()
    tab.locator(".t").first.hover()
    shown = tab.locator(".detail").first.inner_text()
    assert "".join(PAYLOADS[:2]).replace('"', '\\"') in shown
    assert "\N{EN DASH}" in shown, "a temperature that is not a number"
    assert tab.locator(".t *, .detail script, .detail img, .detail svg").count() == 0
    assert (ran, logs, urls) == ([], [], [(tmp_path / "report.html").as_uri()])
    # And were something to get through, the policy would stop it.
    tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"data:,\" onerror=\"alert(1)\">');"
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'alert(2)'}))"
    )
    tab.wait_for_timeout(200)
    assert (ran, [("Content Security Policy" in line) for line in logs]) == ([], [True, True])


CLIPPED = """() => {
  for (const details of document.querySelectorAll('details')) details.open = true;
  const wrong = [];
  for (const e of document.querySelectorAll('html, body, body *')) {
    if (e.classList.contains('unseen')) continue;
    if (e.clientWidth && e.scrollWidth > e.clientWidth + 1) wrong.push(`${e.tagName} ${e.className}: ${e.scrollWidth}`);
  }
  const readable = (image) => image.clientWidth > 0.65 * image.naturalWidth;
  for (const image of document.images) if (!readable(image) || !image.alt) wrong.push(image.alt);
  return wrong;
}"""
FAINT = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (x) => (x /= 255) <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = (c) => { const [r, g, b] = c.map(linear);
                         return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const wrong = {};
  for (const e of document.querySelectorAll('body *')) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    let under = e, back = parse(getComputedStyle(e).backgroundColor);
    while (back[3] === 0 && (under = under.parentElement)) back = parse(getComputedStyle(under).backgroundColor);
    if (!under) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color).slice(0, 3)), light(back.slice(0, 3))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) wrong[`${e.tagName}.${e.className}`] = ratio.toFixed(2);
  }
  return wrong;
}"""
"""Text whose contrast is below that of WCAG AA, which is 4.5."""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_on_a_desktop_and_a_phone_light_and_dark(tmp_path, benign, visit, width, theme):
    """Nothing is clipped, faint or without a name; nothing is requested or logged; definitions open and close."""
    text = benign if (width == 1280) == (theme == "dark") else page(runs(str)[1:])
    tab, urls, logs, _ = visit(tmp_path / "x.html", text, viewport={"width": width, "height": 800}, color_scheme=theme)
    assert len(text) < 1e6
    assert tab.locator(".detail tr").count() > 0, "a token is shown from the start"
    assert (tab.evaluate(CLIPPED), tab.evaluate(FAINT)) == ([], {})
    shown = tab.evaluate("[...document.querySelectorAll('.table table')].map((x) => getComputedStyle(x).display)")
    assert set(shown) == {"table" if width == 1280 else "block"}
    tab.locator(".t").first.focus()
    for key, place in (("ArrowRight", 2), ("End", 2), ("ArrowRight", 2), ("Home", 1)):
        tab.keyboard.press(key)
        assert tab.evaluate("document.activeElement.dataset.i") == str(place), key
    assert tab.locator(".heatmap").first.locator(".on").count() == 2, "the same token in both texts"
    term, box = tab.locator(".term:visible", has_text=re.compile("^ECE$")).first, tab.locator("#definition")
    assert not box.is_visible()
    term.focus()
    assert "calibration error" in box.inner_text()
    inside = box.bounding_box()
    assert 0 <= inside["x"] <= width - inside["width"]
    tab.keyboard.press("Escape")
    assert not box.is_visible()
    assert (logs, urls) == ([], [(tmp_path / "x.html").as_uri()])
