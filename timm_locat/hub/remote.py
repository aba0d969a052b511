"""Push to the Hugging Face Hub and pull from it.

A push is one commit: what the repository shows is the old model or the new one. Large files go up first and are
known by their digest, so that a push after a broken connection sends what is missing. A pull looks at the list of files
before it fetches one, and the folder appears when everything in it has been checked.
"""

import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from timm_locat._version import __version__
from timm_locat.errors import UserError, require
from timm_locat.hub.contents import FILES, check_names, load_folder
from timm_locat.hub.package import package
from timm_locat.hub.probe import check_probe
from timm_locat.hub.verify import verify

__all__ = ["Pushed", "hub_api", "pull", "push"]

log = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 4
WAIT = 2.0
"""Seconds before the second attempt; doubled before each further one."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What a push did, or with `dry_run` would do."""

    files: dict[str, str]
    """`new`, `changed` or `same`, by name."""
    commit: str | None
    """Id of the new commit; None where nothing had changed or nothing was sent."""
    url: str | None
    """Of the commit, or of the pull request."""


def hub_api() -> Any:
    """The Hub's client under this package's name; token and endpoint as the Hub's own tools take them."""
    hub = require("huggingface_hub", "hub", "the Hub")
    return hub.HfApi(library_name="timm-locat", library_version=__version__)


def push(
    source: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    tag: str | None = None,
    license: str | None = None,  # noqa: A002
    dry_run: bool = False,
    api: Any = None,
) -> Pushed:
    """Publish a model.

    Args:
        source: A run folder, an exported folder, or a timm model name.
        repo_id: `owner/name`; made when it is not there.
        private: Make a new repository private. An old one stays as it is.
        revision: Branch to push to, made when it is not there; None is the main one.
        create_pr: Open a pull request instead of writing to the branch.
        tag: Name for the pushed state.
        license: Of the weights; None takes that of the model's configuration.
        dry_run: Send nothing and make nothing; say what would be sent.
        api: A `huggingface_hub.HfApi`; None makes one.

    Raises:
        UserError: The model is not in order, or the Hub refuses; the sentence says what to do. The repository then
            shows what it showed before.
    """
    hub = require("huggingface_hub", "hub", "push")
    api = hub_api() if api is None else api
    if create_pr and tag:
        raise UserError("a pull request cannot be tagged: leave out tag or create_pr")
    with tempfile.TemporaryDirectory(prefix="timm-locat-push-") as scratch:
        folder = Path(scratch, "model")
        package(source, folder, repo_id=repo_id, license=license)
        verify(folder)
        with translated(f"push to {repo_id}"):
            if not dry_run:
                attempt(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
                if revision and not create_pr:
                    attempt(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
            there = listing(api, repo_id, revision)
            check_names(there.files, f"{repo_id} on the Hub")
            plan = compare(folder, there.files)
            if dry_run:
                return Pushed(files=plan, commit=None, url=None)
            commit = None
            if any(state != "same" for state in plan.values()):
                paths = [name for name, state in plan.items() if state != "same"]
                commit = attempt(
                    lambda: api.create_commit(
                        repo_id,
                        # New for each attempt: the client marks operations as sent.
                        [hub.CommitOperationAdd(path_in_repo=n, path_or_fileobj=str(folder / n)) for n in paths],
                        commit_message="Model from timm-locat",
                        revision=revision,
                        create_pr=create_pr,
                        parent_commit=there.commit,
                    )
                )
            if tag:
                attempt(lambda: api.create_tag(repo_id, tag=tag, revision=revision))
    return Pushed(
        files=plan,
        commit=None if commit is None else commit.oid,
        url=None if commit is None else commit.pr_url or commit.commit_url,
    )


@dataclass(frozen=True)
class Listing:
    """What a repository holds."""

    commit: str | None
    files: dict[str, str]
    """Digest by name: SHA-256 of large files, git's own of the others."""


def listing(api: Any, repo_id: str, revision: str | None) -> Listing:
    """Files of a revision; none where the repository or the branch is not there yet."""
    errors = require("huggingface_hub.errors", "hub", "the Hub")
    try:
        info = attempt(lambda: api.model_info(repo_id, revision=revision, files_metadata=True))
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        return Listing(None, {})
    return Listing(info.sha, {s.rfilename: s.lfs.sha256 if s.lfs else s.blob_id for s in info.siblings or []})


def compare(folder: Path, there: dict[str, str]) -> dict[str, str]:
    """`new`, `changed` or `same` for each file of a folder, in the order of `FILES`."""
    plan = {}
    for name in FILES:
        if (folder / name).exists():
            data = (folder / name).read_bytes()
            digests = {hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
            plan[name] = "new" if name not in there else "same" if there[name] in digests else "changed"
    return plan


def pull(repo_id: str, folder: str | Path | None = None, *, revision: str | None = None, api: Any = None) -> Path:
    """Fetch a model that timm wrote into a folder, after a look at what the repository holds.

    Args:
        repo_id: `owner/name`.
        folder: New or empty; None takes the repository's name in the working folder. It appears whole or not at all.
        revision: Branch, tag or commit.
        api: A `huggingface_hub.HfApi`; None makes one.

    Returns:
        The folder.

    Raises:
        UserError: No such repository, something in it that may not be read, or no space. Nothing is left behind but
            what the Hub's client keeps in its own cache, from which the next attempt goes on.
    """
    api = hub_api() if api is None else api
    folder = Path(repo_id.rpartition("/")[2] if folder is None else folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder; give another one")
    with translated(f"pull {repo_id}"):
        info = attempt(lambda: api.model_info(repo_id, revision=revision))
        check_names((s.rfilename for s in info.siblings or []), f"{repo_id} on the Hub")
        cached = Path(attempt(lambda: api.snapshot_download(repo_id, revision=info.sha, allow_patterns=list(FILES))))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            for name in FILES:
                if (cached / name).exists():
                    shutil.copyfile(cached / name, made / name)
            check_probe(load_folder(made), made)
            if folder.exists():
                folder.rmdir()
            made.replace(folder)
    return folder


def attempt(call: Callable[[], T]) -> T:
    """The answer of a call to the Hub, asked again after what passes: a broken connection, or a fault of the server."""
    for number in range(1, ATTEMPTS + 1):
        try:
            return call()
        except network_errors() as err:
            if number == ATTEMPTS or not passes(err):
                raise
            wait = WAIT * 2 ** (number - 1)
            log.warning("the Hub did not answer (%s); again in %.0f s", first_line(err), wait)
            time.sleep(wait)
    raise AssertionError("not reached")


def network_errors() -> tuple[type[BaseException], ...]:
    """What the Hub's client raises for the network: OSError, and its HTTP library's own, which differs by version."""
    errors = require("huggingface_hub.errors", "hub", "the Hub")
    return (OSError, getattr(errors, "HTTPError", OSError))


def status(err: BaseException) -> int | None:
    """HTTP status behind an error, or None."""
    return getattr(getattr(err, "response", None), "status_code", None)


def passes(err: BaseException) -> bool:
    """Whether the same call may succeed a moment later."""
    code = status(err)
    if code is not None:
        return code >= 500 or code == 429
    # The disk, a missing file and a missing token do not mend themselves.
    return not isinstance(err, OSError) or isinstance(err, ConnectionError | TimeoutError)


def first_line(err: BaseException) -> str:
    """The start of an error's text, or its type where it has none."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0]


ADVICE = {
    401: "the token is missing or not valid; run `hf auth login`",
    403: "the token may not write there; use one with write access to the owner",
    409: "somebody else has written there in the meantime; run the command again",
    412: "somebody else has written there in the meantime; run the command again",
    429: "too many requests; wait a while, then run the command again",
}


@contextmanager
def translated(doing: str) -> Any:
    """Turn what the Hub's client raises into one sentence with the next step."""
    errors = require("huggingface_hub.errors", "hub", "the Hub")
    try:
        yield
    except UserError:
        raise
    except errors.RevisionNotFoundError as err:
        raise UserError(
            f"cannot {doing}: there is no such branch, tag or commit; leave out revision for the main one"
        ) from err
    except errors.GatedRepoError as err:
        raise UserError(f"cannot {doing}: access has to be asked for on its page; then run the command again") from err
    except errors.RepositoryNotFoundError as err:
        raise UserError(
            f"cannot {doing}: there is no such repository, or it is private and the token (`hf auth login`) does not "
            "reach it"
        ) from err
    except errors.HFValidationError as err:
        raise UserError(f"cannot {doing}: the name must read owner/name ({first_line(err)})") from err
    except network_errors() as err:
        code = status(err)
        if code in ADVICE:
            step = ADVICE[code]
        elif code is not None and code < 500:
            step = f"the Hub refused with status {code} ({first_line(err)})"
        elif code is not None or passes(err):
            step = (
                f"the Hub could not be reached ({first_line(err)}); run the command again, it goes on where it stopped"
            )
        else:
            step = f"{getattr(err, 'strerror', None) or first_line(err)}; make room or mend the path, then run it again"
        raise UserError(f"cannot {doing}: {step}") from err
