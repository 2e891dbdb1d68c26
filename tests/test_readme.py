"""The README's Python runs as it stands, but for the two paths that only its reader knows."""

import re
from pathlib import Path

import jax
from assets import model_path

import calibjax

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_python_blocks_run(tmp_path):
    model = model_path("stories260K")
    lm = calibjax.load_model(model)
    config = calibjax.HeadConfig(kind="mlp", hidden_size=lm.config.hidden_size)
    head = calibjax.FittedHead(config, config.init(jax.random.key(0)), 0.0, lm.fingerprint)
    calibjax.save_head(tmp_path / "x" / "head", head)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 3
    namespace = {}
    for block in blocks:
        code = block.replace("path/to/model", str(model)).replace("runs/x", str(tmp_path / "x"))
        exec(compile(code, "README.md", "exec"), namespace)
    assert float(namespace["value"]) > 0
    gradient = jax.tree.leaves(namespace["gradient"])
    assert any(float(abs(g).max()) > 0 for g in gradient)
    assert namespace["log_probs"].shape == (*namespace["inputs"].shape, lm.config.vocab_size)


def test_first_screen_holds_two_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", README, flags=re.DOTALL)[:2]
    assert all(command.startswith("python3 -m venv .venv && ") and "\n" not in command for command in commands)
    assert "quickstart" in commands[0]
    assert "pytest" in commands[1]
