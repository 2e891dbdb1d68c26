"""Repositories of the Hugging Face Hub, through huggingface_hub: the local folder of one, and a commit to one."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from calibjax.runtime.errors import UserError, first_line

_NAME = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?")


class Repository(NamedTuple):
    """A repository, and a branch, tag or commit of it; None for the newest of its main branch."""

    name: str
    revision: str | None


def repository_of(path: str | Path) -> Repository | None:
    """Reads `name`, `org/name` or `org/name@revision`; None where this path exists, or it has another form."""
    match = _NAME.fullmatch(str(path))
    return None if match is None or Path(path).exists() else Repository(match[1], match[2])


def download(repository: Repository, what: str, files: Sequence[str], skipped: Sequence[str] = ()) -> Path:
    """Downloads files of a repository of models, by their patterns, into the cache; returns the folder.

    Raises:
        UserError: there is no such repository or revision, it is not open to this user, or neither the Hub nor a
            complete copy in the cache can be reached.
    """
    from huggingface_hub import snapshot_download

    patterns: Any = {"allow_patterns": [*files], "ignore_patterns": [*skipped]}
    try:
        return Path(snapshot_download(repository.name, revision=repository.revision, **patterns))
    except Exception as error:  # httpx's errors are no OSErrors
        failed = f"could not be downloaded from the Hugging Face hub ({_reason(error, repository)})"
        hint = "Give the path of a directory, or a hub id that is cached or reachable."
        raise UserError(f"{what}: {repository.name} is not a local directory and {failed}. {hint}") from error


def commit_of(folder: Path | None) -> Repository | None:
    """The repository and commit that `download` returned as a folder; None for other folders."""
    if folder is None or folder.parent.name != "snapshots" or not folder.parents[1].name.startswith("models--"):
        return None
    return Repository("/".join(folder.parents[1].name.split("--")[1:]), folder.name)


def check_upload(name: str) -> None:
    """Raises `UserError` where `upload` would before any transfer: a name of another form, offline, or no token."""
    from huggingface_hub import constants, get_token

    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise UserError(f"{name}: expected a repository as org/name.")
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set: unset it to upload.")
    if get_token() is None:
        raise UserError(f"{name}: no token: set HF_TOKEN to one with write access, or run `hf auth login`.")


def upload(name: str, files: Mapping[str, bytes], message: str, *, private: bool = False) -> str:
    """Writes files, content by name, to a new or existing repository of models; returns the hash of the commit.

    Raises:
        UserError: as `check_upload`, or the Hub refuses it or cannot be reached; nothing was committed then.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    check_upload(name)
    try:
        api = HfApi()
        api.create_repo(name, private=private or None, exist_ok=True)
        operations = [CommitOperationAdd(path, content) for path, content in files.items()]
        return api.create_commit(name, operations, commit_message=message).oid
    except Exception as error:
        reason = _reason(error, Repository(name, None))
        raise UserError(f"{name}: nothing was uploaded to the Hugging Face hub ({reason}).") from error


def _reason(error: Exception, repository: Repository) -> str:
    from huggingface_hub import errors

    response = error.response if isinstance(error, errors.HfHubHTTPError) else None
    status = None if response is None else response.status_code
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "it is not in the cache, and the hub is switched off or cannot be reached"
    if isinstance(error, errors.GatedRepoError):
        return "it is gated: accept its conditions on its page, and set HF_TOKEN or run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {repository.revision}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "no such repository, or a private one that HF_TOKEN does not open"
    if status in (401, 403):
        return f"status {status}: the token in HF_TOKEN, or of `hf auth login`, does not allow it"
    return first_line(error)
