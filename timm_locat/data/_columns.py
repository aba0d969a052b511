"""Which columns of a table hold images and labels, and what its labels mean."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from timm_locat.data._folders import follows_training
from timm_locat.errors import UserError

if TYPE_CHECKING:
    from timm_locat.data._tables import Table

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")


def image_and_label(table: "Table") -> tuple[str, str]:
    """The columns of the images and of the labels."""
    image = _pick_column(table, "image", IMAGE_COLUMNS, _is_image)
    return image, _pick_column(table, "label", LABEL_COLUMNS, _is_class_label)


def _pick_column(table: "Table", what: str, names: Sequence[str], is_such: Any) -> str:
    """The column of one of the usual names, else the only one of the right kind."""
    features = table.features
    for name in names:
        if name in features and (what == "label" or is_such(features[name])):
            return name
    such = [name for name, feature in features.items() if is_such(feature)]
    if len(such) == 1:
        return such[0]
    raise UserError(
        f"expected a column named {' or '.join(names)} with the {what}s in {table.where}, got columns "
        f"{', '.join(features)}; rename the right one"
    )


def pick_image_column(table: "Table", what: str, names: Sequence[str], taken: str | None = None) -> str:
    """The column of one of the usual names that holds pictures, else the only other one that does."""
    such = [name for name, feature in table.features.items() if _is_image(feature) and name != taken]
    named = [name for name in names if name in such]
    if named or len(such) == 1:
        return (named or such)[0]
    raise UserError(
        f"expected a column of pictures named {' or '.join(names)} with the {what}s in {table.where}, got columns "
        f"{', '.join(table.features)}; rename the right one"
    )


def _is_image(feature: Any) -> bool:
    """An Image feature, or what it is stored as where the file does not say: bytes, or a struct that has bytes."""
    if isinstance(feature, dict):
        return "bytes" in feature
    return type(feature).__name__ == "Image" or getattr(feature, "dtype", None) in ("binary", "large_binary")


def _is_class_label(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def label_kind(table: "Table", column: str) -> str:
    """`names` for a ClassLabel column, `whole numbers` or `strings`."""
    feature = table.features.get(column)
    dtype = getattr(feature, "dtype", type(feature).__name__)
    if _is_class_label(feature):
        return "names"
    if re.fullmatch(r"u?int(8|16|32|64)", dtype):
        return "whole numbers"
    if dtype in ("string", "large_string"):
        return "strings"
    raise UserError(
        f"expected class labels, whole numbers or strings in column {column} of {table.where}, got {dtype}; convert it"
    )


def labels_of(
    table: "Table", trained: "Table | None", column: str, split: str, classes: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels (N,) int64 in the order of `classes` or, without them, of the training split; and the class names."""
    kind = label_kind(table, column)
    values = table.column(column)
    if None in values:
        row = table.origins.source(values.index(None))
        raise UserError(f"{row} has nothing in column {column}; fill it in or remove the row")
    if kind == "names":
        here = tuple(table.features[column].names)
        _check_range(values, len(here), table)
        values = [here[value] for value in values]
    if classes is None:
        classes = classes_of_training(table, trained, column, split, kind, values)
    if kind == "whole numbers":
        _check_range(values, len(classes), table)
        return torch.tensor(values, dtype=torch.int64), classes
    order = {name: label for label, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value not in order:
            raise UserError(
                f"{table.origins.source(row)} has label {value!r}, which is none of the {len(classes)} classes of the "
                "training split or of classes=...; remove the row, or add the class there"
            )
    return torch.tensor([order[value] for value in values], dtype=torch.int64), classes


def classes_of_training(
    table: "Table", trained: "Table | None", column: str, split: str, kind: str, values: list[Any]
) -> tuple[str, ...]:
    """Class names as the training split has them: stated by it, or found among its labels."""
    source = trained or table
    if source.features.get(column) is None or label_kind(source, column) != kind:
        raise UserError(f"column {column} of {source.where} holds no {kind} as {table.where} does; write them alike")
    if kind == "names":
        return tuple(source.features[column].names)
    if trained is None and follows_training(split):
        raise UserError(
            f"{table.where} has no training split beside it to tell which classes there are; give the class names in "
            "the order of their labels (classes=...)"
        )
    seen = trained.column(column) if trained else values
    if kind == "strings":
        return tuple(sorted({value for value in seen if value is not None}))
    return tuple(str(label) for label in range(1 + max((value for value in seen if value is not None), default=-1)))


def _check_range(labels: list[int], num_classes: int, table: "Table") -> None:
    for row, label in enumerate(labels):
        if not 0 <= label < num_classes:
            raise UserError(
                f"{table.origins.source(row)} has label {label}, but the labels of {num_classes} classes are "
                f"0..{num_classes - 1}; correct the label or remove the row"
            )
