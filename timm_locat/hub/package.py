"""The folder that is published: weights, configuration, card, record and probe of a run or a model."""

import json
import shutil
import tempfile
from pathlib import Path

from timm_locat.errors import UserError
from timm_locat.hub.card import MARK, model_card
from timm_locat.hub.contents import CARD, CONFIG, PROBE, RECORD, WEIGHTS, load_folder
from timm_locat.hub.export import export
from timm_locat.hub.probe import check_probe, write_probe
from timm_locat.models import create_model
from timm_locat.record import atomic_write, read_record

__all__ = ["package", "write_card"]


def package(source: str | Path, folder: str | Path, *, repo_id: str | None = None, license: str | None = None) -> None:  # noqa: A002
    """Write everything that is published of a model into a new folder.

    Args:
        source: A run folder, another exported folder, or a timm model name whose weights are loaded.
        folder: New or empty. It appears whole or not at all.
        repo_id: `owner/name` under which it will be found; the card says it. None: the folder itself.
        license: Of the weights; None takes that of the model's configuration.

    Raises:
        UserError: There is no such model, or the folder is in use.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder; give another one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            write_all(
                source,
                made,
                load=f"hf-hub:{repo_id}" if repo_id else f"local-dir:{folder}",
                license=license,
                repo_id=repo_id,
            )
            if folder.exists():
                folder.rmdir()
            made.replace(folder)
    except OSError as err:
        raise UserError(f"cannot write {folder}: {err.strerror or err}; nothing was left behind") from err


def write_all(source: str | Path, folder: Path, *, load: str, license: str | None, repo_id: str | None) -> None:  # noqa: A002
    """The parts, in a folder that nobody sees yet."""
    record, own = None, None
    if Path(source).is_dir():
        model = load_folder(Path(source))
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(Path(source, name), folder / name)
        if Path(source, RECORD).exists():
            record = read_record(Path(source, RECORD))
            shutil.copyfile(Path(source, RECORD), folder / RECORD)
        if check_probe(model, Path(source)) is not None:
            # Kept, so that a push from another machine does not differ in the last digits.
            shutil.copyfile(Path(source, PROBE), folder / PROBE)
        own = own_card(Path(source))
    else:
        model = create_model(str(source), pretrained=True).eval()
        export(model, folder, label_names=model.pretrained_cfg.get("label_names"))
        beside = Path(model.pretrained_cfg.get("file") or "").with_suffix(".json")
        if beside.name and beside.is_file():
            record = read_record(beside)
            shutil.copyfile(beside, folder / RECORD)
    if not (folder / PROBE).exists():
        write_probe(model, folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    text = model_card(config, record, load=load, repo_id=repo_id, license=license) if own is None else own
    atomic_write(folder / CARD, text)


def own_card(folder: Path) -> str | None:
    """The card of a folder if somebody has taken it over, by deleting the line that says it was generated."""
    path = folder / CARD
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    return None if MARK in text else text


def write_card(folder: str | Path, *, repo_id: str | None = None, license: str | None = None) -> Path:  # noqa: A002
    """Write the card of a folder anew, from its configuration and its record.

    Raises:
        UserError: The folder holds no model.
    """
    folder = Path(folder)
    load_folder(folder)
    if own_card(folder) is not None:
        raise UserError(f"{folder / CARD} was written by hand; move it away to have one generated")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    record = read_record(folder / RECORD) if (folder / RECORD).exists() else None
    load = f"hf-hub:{repo_id}" if repo_id else f"local-dir:{folder}"
    atomic_write(folder / CARD, model_card(config, record, load=load, repo_id=repo_id, license=license))
    return folder / CARD
