"""`calibjax push`: a fitted head on the Hugging Face Hub, with its figures and a model card."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

from calibjax.commands.export import HeadOptions, write_export
from calibjax.eval.report.figures import figures_of, png
from calibjax.eval.report.notes import Subject, model_card
from calibjax.eval.report.schema import Document, as_user_error, read_metrics
from calibjax.models.hub import check_upload, commit_of, repository_of, upload
from calibjax.runtime.context import Log
from calibjax.runtime.errors import UserError, about
from calibjax.runtime.files import check_new_directory, json_text, new_directory, write_file
from calibjax.runtime.options import Positional


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushOptions(HeadOptions):
    """Uploads the head of a run to the Hugging Face Hub, in one commit: what `calibjax export` writes, metrics.json
    without paths of this machine, the reliability diagram, and a model card made from them.

    The token comes from HF_TOKEN or `hf auth login`. `--head org/name` and `calibjax.load_head("org/name")` read it.
    Example: calibjax push runs/ats org/name --dry-run card

    Attributes:
        run: directory of a finished run of `train ats` or `quickstart`, whose figures the card shows.
        repository: org/name; made where there is none.
        base: id of the base model on the hub, for the card, as org/name or org/name@revision; by default the run's.
        private: make a new repository private.
        dry_run: new directory to write the files and the card to, instead of uploading them.
    """

    repository: Annotated[str, Positional()]
    base: str | None = None
    private: bool = False
    dry_run: Path | None = None


def run(options: PushOptions, log: Log = print) -> Document:
    base = None if options.base is None else repository_of(options.base)
    if options.base is not None and base is None:
        raise UserError(f"--base {options.base}: expected org/name or org/name@revision.")
    if options.dry_run is None:
        check_upload(options.repository)
    else:
        with about("--dry-run"):
            check_new_directory(options.dry_run)
    document = read_metrics(options.run / "metrics.json")
    if options.method not in document["held_out"]["methods"]:
        raise UserError(f"{options.run}: expected a run of `train ats`, with held-out figures of {options.method}.")
    with tempfile.TemporaryDirectory() as folder:
        head, lm = write_export(options, Path(folder) / "head", log)
        files = {file.name: file.read_bytes() for file in sorted((Path(folder) / "head").iterdir())}
    base_name, revision = base or commit_of(lm.path) or (None, None)
    subject = Subject(
        repository=options.repository,
        base=base_name,
        revision=revision,
        name="" if lm.path is None else lm.path.resolve().name,
        fingerprint=lm.fingerprint,
        method=options.method,
        head=repr(head),
    )
    document["run"] = _without_paths(document.get("run", {}))
    with as_user_error(options.run / "metrics.json"):
        drawing = next(drawing for drawing in figures_of(document) if drawing.name == "reliability")
        files |= {
            "reliability.png": png(drawing.figure()),
            "metrics.json": json_text(document).encode(),
            "README.md": model_card(document, subject).encode(),
        }
    commit = None
    if options.dry_run is not None:
        with new_directory(options.dry_run) as folder:
            for name, content in files.items():
                write_file(folder / name, content)
        log(f"{head!r} for {options.repository} in {options.dry_run}: {', '.join(sorted(files))}; nothing was uploaded")
    else:
        commit = upload(options.repository, files, f"Head for {subject.base or subject.name}", private=options.private)
        log(f"{head!r} in {options.repository}@{commit}: {', '.join(sorted(files))}")
    return {"repository": options.repository, "commit": commit, "base": subject.base, "files": sorted(files)}


def _without_paths(value: Any) -> Any:
    """A JSON value with names in place of paths of this machine."""
    if isinstance(value, dict):
        return {name: _without_paths(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_paths(entry) for entry in value]
    is_path = isinstance(value, str) and "/" in value and (value.startswith(("/", "~", ".")) or Path(value).exists())
    return Path(value).name if is_path else value
