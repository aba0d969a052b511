"""python -m timm_locat.hub export|push|pull|verify|card  [--help]"""

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from timm_locat.errors import require, run_cli
from timm_locat.hub.package import package, write_card
from timm_locat.hub.remote import Pushed, pull, push
from timm_locat.hub.verify import verify

tyro = require("tyro", "train", "python -m timm_locat.hub")
Positional = tyro.conf.Positional


@dataclass(frozen=True)
class Export:
    """Write what would be published into a folder: weights, configuration, card, record, a picture with its logits."""

    source: Positional[str]
    """A run folder, an exported folder, or a timm model name whose weights are loaded."""
    folder: Positional[Path]
    """New or empty folder."""
    license: str | None = None
    """Of the weights, as the Hub names it; that of the model's configuration when left out."""

    def run(self) -> str:
        package(self.source, self.folder, license=self.license)
        return "\n".join([f"wrote {self.folder}", *verify(self.folder)])


@dataclass(frozen=True)
class Push:
    """Publish a model on the Hub in one commit. Nothing is committed where nothing has changed."""

    source: Positional[str]
    """A run folder, an exported folder, or a timm model name."""
    repo_id: Annotated[Positional[str], tyro.conf.arg(metavar="OWNER/NAME")]
    private: bool = False
    """Make a new repository private."""
    revision: str | None = None
    """Branch to push to; made when it is not there."""
    create_pr: bool = False
    """Open a pull request instead of writing to the branch."""
    tag: str | None = None
    """Name for the pushed state."""
    license: str | None = None
    """Of the weights, as the Hub names it."""
    dry_run: bool = False
    """Check the model and show what would be sent; send nothing."""

    def run(self) -> str:
        options = dict(private=self.private, revision=self.revision, create_pr=self.create_pr, tag=self.tag)
        done = push(self.source, self.repo_id, license=self.license, dry_run=self.dry_run, **options)
        return told(done, self.repo_id, self.dry_run)


@dataclass(frozen=True)
class Pull:
    """Fetch a model into a folder, after a look at what the repository holds."""

    repo_id: Annotated[Positional[str], tyro.conf.arg(metavar="OWNER/NAME")]
    folder: Path | None = None
    """New or empty folder; the repository's name when left out."""
    revision: str | None = None
    """Branch, tag or commit."""

    def run(self) -> str:
        folder = pull(self.repo_id, self.folder, revision=self.revision)
        return f"wrote {folder}; load it with: timm.create_model('local-dir:{folder}', pretrained=True)"


@dataclass(frozen=True)
class Verify:
    """Check a folder or a repository: files, configuration, weights, logits of the kept picture, card, record."""

    model: Annotated[Positional[str], tyro.conf.arg(metavar="FOLDER|OWNER/NAME")]
    revision: str | None = None
    """Branch, tag or commit of a repository."""

    def run(self) -> str:
        if Path(self.model).is_dir() or self.model.count("/") != 1:
            return "\n".join(verify(self.model))
        with tempfile.TemporaryDirectory(prefix="timm-locat-verify-") as scratch:
            return "\n".join(verify(pull(self.model, Path(scratch, "model"), revision=self.revision)))


@dataclass(frozen=True)
class Card:
    """Write the model card of a folder anew, from its configuration and its record."""

    folder: Positional[Path]
    """A run folder or an exported folder."""
    repo_id: Annotated[str | None, tyro.conf.arg(metavar="OWNER/NAME")] = None
    """Where the model will be published."""
    license: str | None = None
    """Of the weights, as the Hub names it."""

    def run(self) -> str:
        return f"wrote {write_card(self.folder, repo_id=self.repo_id, license=self.license)}"


COMMANDS = {"export": Export, "push": Push, "pull": Pull, "verify": Verify, "card": Card}


def told(done: Pushed, repo_id: str, dry_run: bool) -> str:
    """What a push did, for people."""
    lines = [f"{state:8} {name}" for name, state in done.files.items()]
    if dry_run:
        lines.append(f"nothing was sent to {repo_id}; leave out --dry-run to push")
    elif done.commit is None:
        lines.append(f"{repo_id} has all of it already; no commit was made")
    else:
        lines.append(f"pushed: {done.url}")
    return "\n".join(lines)


def main() -> None:
    """Read the command line and run it."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="python -m timm_locat.hub", description="Models for the Hugging Face Hub, and from it."
    )
    print(command.run())


if __name__ == "__main__":
    run_cli(main)
