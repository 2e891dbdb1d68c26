"""Prints the lowest version of every dependency that pyproject.toml allows, as `name==version` lines for pip-audit."""

import itertools
import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lower_bounds() -> dict[str, str]:
    """Name -> lowest version, of the dependencies and all extras that have one."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    listed = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    found = (re.match(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+)", requirement) for requirement in listed)
    return {match[1]: match[2] for match in found if match}


if __name__ == "__main__":
    for name, version in lower_bounds().items():
        print(f"{name}=={version}{'.0' * (2 - version.count('.'))}")
