"use strict";

// Definitions: on hover, focus or tap, from the list at the end of the page.
{
  const box = document.getElementById("definition");
  let shown = null;
  const hide = () => { box.hidden = true; shown = null; };
  const define = (term) => {
    shown = term;
    box.textContent = document.getElementById(term.getAttribute("aria-describedby")).textContent;
    box.hidden = false;
    const at = term.getBoundingClientRect();
    const below = at.bottom + 8 + box.offsetHeight < innerHeight;
    box.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - box.offsetWidth - 8))}px`;
    box.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - 8 - box.offsetHeight)}px`;
  };
  for (const term of document.querySelectorAll(".term")) {
    for (const event of ["pointerenter", "focus", "click"]) term.addEventListener(event, () => define(term));
    for (const event of ["pointerleave", "blur"]) term.addEventListener(event, hide);
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", () => { if (shown) define(shown); }, { passive: true });
}

for (const section of document.querySelectorAll(".heatmap")) {
  const data = JSON.parse(section.querySelector("script").textContent);
  const detail = section.querySelector(".detail");
  const fixed = (x, digits) => (x === null ? "\u2013" : x.toFixed(digits)); // null: not a finite number
  const percent = (p) => (p === null ? "\u2013" : fixed(100 * p, p < 0.1 ? 2 : 1) + "%");
  const make = (kind, text, cls) => {
    const element = document.createElement(kind);
    element.textContent = text; // never as HTML: it is a model's text
    if (cls) element.className = cls;
    return element;
  };
  const table = (columns, rows, cls) => {
    const out = document.createElement("table");
    for (const [kind, cells] of [["th", columns], ...rows.map((row) => ["td", row])]) {
      const line = out.insertRow();
      cells.forEach((cell, i) => line.append(make(kind, cell, i === 0 && kind === "td" ? cls : "")));
    }
    return out;
  };
  const shown = (text) => (text === "" ? "\u2205" : JSON.stringify(text));

  const show = (token) => {
    const one = data[token.dataset.i];
    for (const old of section.querySelectorAll(".on")) old.classList.remove("on");
    for (const same of section.querySelectorAll(`[data-i="${token.dataset.i}"]`)) same.classList.add("on");
    const left = document.createElement("div");
    left.append(make("p", `${shown(one.text)}${one.right ? "" : ", not the most likely"}`, "text"));
    left.append(table(["", "before", "after"], [
      ["probability of this token", ...one.probability.map(percent)],
      ["confidence", ...one.confidence.map(percent)],
      ["entropy, nats", ...one.entropy.map((h) => fixed(h, 3))],
      ["temperature", "1", fixed(one.temperature, 3)],
    ]));
    const right = document.createElement("div");
    right.append(make("p", "Most likely tokens"));
    right.append(table(["", "before", "after"], one.top.map(([text, p, q]) => [shown(text), percent(p), percent(q)]), "text"));
    detail.replaceChildren(left, right);
  };

  // A token is shown from the start: the wrong one whose confidence falls most.
  const fall = (one) => (one && !one.right ? one.confidence[0] - one.confidence[1] : -Infinity);
  const first = data.reduce((best, one, i) => (fall(one) > fall(data[best]) ? i : best), data.findIndex(Boolean));
  const chosen = section.querySelector(`[data-i="${first}"]`);
  if (chosen) show(chosen);

  // On a phone one side is shown at a time.
  const buttons = [...section.querySelectorAll(".toggle button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      section.classList.toggle("after", button.dataset.side === "1");
      for (const each of buttons) each.setAttribute("aria-pressed", each === button);
    });
  }

  for (const side of section.querySelectorAll(".tokens")) {
    const tokens = [...side.querySelectorAll(".t")];
    const go = (to) => {
      for (const token of tokens) token.tabIndex = -1;
      to.tabIndex = 0;
      to.focus();
    };
    side.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".t");
      if (token) show(token);
    });
    side.addEventListener("focusin", (event) => {
      const token = event.target.closest(".t");
      if (token) show(token);
    });
    side.addEventListener("click", (event) => {
      const token = event.target.closest(".t");
      if (token) go(token);
    });
    side.addEventListener("keydown", (event) => {
      const at = tokens.indexOf(event.target);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tokens.length - 1 }[event.key];
      if (at < 0 || to === undefined || !tokens[to]) return;
      event.preventDefault();
      go(tokens[to]);
    });
  }
}
