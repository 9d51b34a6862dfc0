# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A folder onto the Hub in one commit, and what can go wrong on the way, in words."""

import logging
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TypeVar

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token

# httpx's base class, whichever httpx the installed huggingface_hub speaks through.
from huggingface_hub.errors import HTTPError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
TRIES = 5
FIRST_WAIT = 1.0  # seconds, doubled after every try, unless the server says how long
LONGEST_WAIT = 60.0
TEMPORARY = (408, 429, 500, 502, 503, 504)
# Of an earlier upload in other shards, which would stay beside the new one.
OLD_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json")


class PublishError(OSError):
    """The Hub did not take the folder; one line that says why and what to do. Nothing on this side is lost."""


def find_token(token: str | None) -> str:
    """The token given, or the one `hf auth login` or `HF_TOKEN` left.

    Raises:
        PublishError: There is none.
    """
    found = token or get_token()
    if found is None:
        raise PublishError("no token for the Hub: log in with `hf auth login`, set HF_TOKEN, or pass token=")
    return found


def push_folder(
    folder: Path,
    repo_id: str,
    *,
    token: str,
    private: bool | None = None,
    revision: str | None = None,
    exist_ok: bool = True,
    commit_message: str,
) -> CommitInfo:
    """
    Creates the repository, and the branch `revision`, where they are missing, and uploads the folder in one commit.

    Temporary errors (429, 5xx, lost connections) are retried. Files that an earlier, interrupted upload got across are
    not sent again. Errors as in `publish`.
    """
    api = HfApi(token=token)
    _try("create the repository", repo_id, lambda: api.create_repo(repo_id, private=private, exist_ok=exist_ok))
    if revision is not None and revision != "main":
        _try(
            f"create the branch {revision}",
            repo_id,
            lambda: api.create_branch(repo_id, branch=revision, exist_ok=True),
        )
    return _try("upload the folder to", repo_id, lambda: _commit(api, folder, repo_id, revision, commit_message))


def _commit(api: HfApi, folder: Path, repo_id: str, revision: str | None, message: str) -> CommitInfo:
    """Not `upload_folder`: it splits a slow upload into several commits, and half a model would be there to load."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    folders = {PurePosixPath(name).parent for name in files if name.endswith(".safetensors")}
    old = [
        name
        for name in api.list_repo_files(repo_id, revision=revision)
        if name not in files
        and PurePosixPath(name).parent in folders
        and any(fnmatchcase(PurePosixPath(name).name, pattern) for pattern in OLD_WEIGHTS)
    ]
    operations = [CommitOperationDelete(path_in_repo=name) for name in old]
    operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in files.items()]
    return api.create_commit(repo_id, operations, commit_message=message, revision=revision)


def _try(action: str, repo_id: str, call: Callable[[], Result]) -> Result:
    """`call()`, again after temporary errors.

    Raises:
        PublishError: It failed for good.
    """
    wait = FIRST_WAIT
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except (HTTPError, RuntimeError) as raised:
            # An upload's error comes wrapped in a RuntimeError that names the file.
            error = raised if isinstance(raised, HTTPError) else raised.__cause__
            if not isinstance(error, HTTPError):
                raise
            response = getattr(error, "response", None)
            status = None if response is None else response.status_code
            if status is not None and status not in TEMPORARY:
                raise PublishError(_in_words(action, repo_id, status, error)) from error
            what = _no_answer(error) if status is None else f"the Hub answered {status}"
            if attempt == TRIES:
                raise PublishError(
                    f"could not {action} {repo_id}: {what}, {TRIES} times; what was uploaded is kept there, so run the "
                    "same again later to go on"
                ) from error
            pause = _retry_after(response) or wait
            logger.warning("%s while trying to %s %s; again in %.0f s", what, action, repo_id, pause)
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT)
    raise AssertionError("unreachable: the last try returns or raises")


def _retry_after(response) -> float | None:
    """Seconds the server asks to wait."""
    value = "" if response is None else response.headers.get("Retry-After", "")
    return min(float(value), LONGEST_WAIT) if value.isdigit() else None


def _no_answer(error: HTTPError) -> str:
    return f"no answer from the Hub ({type(error).__name__})"


def _in_words(action: str, repo_id: str, status: int, error: HTTPError) -> str:
    if status == 401:
        return f"could not {action} {repo_id}: the Hub does not accept the token (401); log in with `hf auth login`"
    if status == 403:
        return (
            f"could not {action} {repo_id}: the token has no right to write there (403); use one with write access, or "
            "a name of your own"
        )
    if status == 404:
        return f"could not {action} {repo_id}: there is no such repository for this token (404)"
    if status == 409:
        return (
            f"could not {action} {repo_id}: the name is taken (409); choose another, or leave out exist_ok=False to "
            "add a commit to it"
        )
    message = getattr(error, "server_message", None) or str(error).strip().splitlines()[0]
    return f"could not {action} {repo_id}: the Hub answered {status}, {message}"
