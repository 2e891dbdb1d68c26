"""The README's Python runs as it stands, but for the two paths that only its reader knows, and with one loss."""

import json
import re
from pathlib import Path

import jax
from assets import model_path

from calibjax.train import options

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_python_blocks_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options, "AUTO", options.AUTO[:1])
    model, data = model_path("stories260K"), tmp_path / "data.jsonl"
    words = ["Once", "upon", "a", "time", "there", "was", "a", "little", "cat", "who", "liked", "to", "play", "outside"]
    rows = [" ".join(words[(row + step) % len(words)] for step in range(60)) for row in range(24)]
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 4
    assert blocks[0].strip().count("\n") <= 10
    namespace = {}
    for block in blocks:
        code = block.replace("path/to/model", str(model)).replace("runs/x", str(tmp_path / "x"))
        exec(compile(code.replace("data.jsonl", str(data)), "README.md", "exec"), namespace)
    assert re.search(r"^ats +\.?\d", capsys.readouterr().out, flags=re.MULTILINE)
    assert float(namespace["value"]) > 0
    gradient = jax.tree.leaves(namespace["gradient"])
    assert any(float(abs(g).max()) > 0 for g in gradient)
    assert namespace["log_probs"].shape == (*namespace["inputs"].shape, namespace["lm"].config.vocab_size)


def test_first_screen_holds_two_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", README, flags=re.DOTALL)[:2]
    assert all(command.startswith("python3 -m venv .venv && ") and "\n" not in command for command in commands)
    assert "quickstart" in commands[0]
    assert "pytest" in commands[1]
