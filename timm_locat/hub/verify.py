"""Is a folder what it claims to be?"""

from pathlib import Path

from timm_locat.errors import UserError, require
from timm_locat.hub.contents import CARD, RECORD, check_names, load_folder
from timm_locat.hub.probe import check_probe
from timm_locat.record import read_record

__all__ = ["verify"]


def verify(folder: str | Path) -> list[str]:
    """Check an exported folder: files, configuration, weights, what the model says to the probe, card, record.

    Args:
        folder: As `python -m timm_locat.hub export` writes it, or `pull` brings it. Nothing in it is executed.

    Returns:
        One line about each part.

    Raises:
        UserError: A part is wrong; the sentence says which and how.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; expected one that export or pull wrote")
    names = [
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()
    ]
    check_names(names, str(folder))
    model = load_folder(folder)
    count = sum(p.numel() for p in model.parameters())
    told = [f"files: {', '.join(sorted(names))}", f"model: {type(model).__name__}, {count:,} parameters, all finite"]
    off = check_probe(model, folder)
    told.append("probe: none was kept, logits not compared" if off is None else f"probe: logits within {off:.1e}")
    told.append(check_card(folder))
    if (folder / RECORD).exists():
        told.append(f"record: {read_record(folder / RECORD)['protocol']}")
    else:
        told.append("record: none")
    return told


def check_card(folder: Path) -> str:
    """One line about the model card.

    Raises:
        UserError: There is none, it cannot be read, or it does not say library and licence.
    """
    hub = require("huggingface_hub", "hub", "verifying a model card")
    path = folder / CARD
    if not path.is_file():
        raise UserError(f"{folder} has no {CARD}; `python -m timm_locat.hub card {folder}` writes one")
    try:
        data = hub.ModelCard.load(path).data
    except Exception as err:  # YAML errors have no type of the Hub's
        reason = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise UserError(f"the front matter of {path} cannot be read: {reason}") from err
    if data.library_name != "timm" or not data.license:
        raise UserError(f"the front matter of {path} must say `library_name: timm` and a `license`")
    return f"card: licence {data.license}, {len(data.eval_results or [])} results"
