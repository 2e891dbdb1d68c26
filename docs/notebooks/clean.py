"""Removes outputs and numbers from the notebooks, and links them to Colab: `python docs/notebooks/clean.py`.

The `.ipynb` files are the source; the site executes them. Where pyproject.toml names the repository (`Repository` of
[project.urls]), every notebook begins with a link to Colab and a cell that installs calibjax there: none of them needs
an accelerator.
"""

import json
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
COLAB = "Open in Colab"
INSTALL = """\
import sys

if "google.colab" in sys.modules:
    !git clone -q {url} /content/calibjax && pip install -q /content/calibjax
    %cd -q /content/calibjax/docs/notebooks"""


def repository() -> str | None:
    """The URL of the repository, as pyproject.toml states it."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {}).get("Repository")


def cell(kind: str, number: int, text: str) -> dict:
    found = {"cell_type": kind, "id": f"cell-{number:02}", "metadata": {}, "source": text.splitlines(keepends=True)}
    return found | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def cleaned(file: Path, url: str | None) -> str:
    """The text of a notebook without outputs, with the link to Colab where there is a repository."""
    cells = [(each["cell_type"], "".join(each["source"])) for each in json.loads(file.read_text())["cells"]]
    cells = [(kind, text) for kind, text in cells if not text.startswith(f"[{COLAB}]") and "google.colab" not in text]
    if url is not None:
        path = f"{url.removeprefix('https://github.com/').removesuffix('.git')}/blob/main/{file.relative_to(ROOT)}"
        link = f"[{COLAB}](https://colab.research.google.com/github/{path})"
        cells[1:1] = [("markdown", link), ("code", INSTALL.format(url=url))]
    notebook = {
        "cells": [cell(kind, number, text) for number, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        notebook.write_text(cleaned(notebook, repository()))
