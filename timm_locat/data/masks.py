"""The one mask reader: whatever file holds a label per pixel arrives as int64 labels, upright, or is refused.

The rules, by Pillow's mode after opening; every reader of masks in this project goes through them:

    P                  the indices, never the colours of the palette.
    1                  0 and 1.
    L, I;16, I         the numbers as stored, 2 and 4 bit grey included (Pillow spreads those over 0..255).
    F                  whole numbers only.
    RGB, RGBA          refused, unless a `palette` says which colour is which label; RGBA must be opaque.
    the rest           refused: with an alpha channel, or in another colour space, a value is no label.

Refused as well: lossy files (JPEG, also inside TIFF, and WebP, AVIF, JPEG 2000, which do not state whether they are);
GIF, whose writers, Pillow among them, number colours anew; files of several frames or pages; TIFFs that state that
white is zero; PGM files of another maximum than 255 or 65535, to which Pillow would scale the labels. Orientation is
taken from EXIF or XMP, as for images.

The stored numbers then pass `id_map`, `reduce_zero_label` and the check against `num_classes`, in this order. Nothing
is cast before it has been checked.
"""

from collections.abc import Mapping, Sequence

import torch
from PIL import Image, ImageOps
from torch import Tensor

from timm_locat.data.images import ImageSource, open_or_say
from timm_locat.errors import UserError

__all__ = ["PALETTES", "Palette", "mask_labels", "read_mask", "stored_values", "voc_colours"]

Colour = tuple[int, int, int]
Palette = str | Sequence[Colour] | Mapping[Colour, int]
"""Name in `PALETTES`, colours in the order of their labels, or the label of each colour; or `panoptic`: COCO's numbers
r + 256 g + 65536 b, which `id_map` turns into labels."""

_UNSAFE = ("JPEG", "MPO", "WEBP", "AVIF", "JPEG2000", "GIF")
_WHITE_IS_ZERO = 0
_TIFF_PHOTOMETRIC = 262
_MANY = 65536  # numbers from here on are looked up by sorting, smaller ones by a table


def voc_colours(count: int) -> dict[Colour, int]:
    """The colour map of PASCAL VOC: bit 3i + c of the label is bit 7 - i of channel c."""
    return {
        tuple(sum((label >> (3 * i + c) & 1) << (7 - i) for i in range(3)) for c in range(3)): label
        for label in range(count)
    }


_CITYSCAPES = (
    *((128, 64, 128), (244, 35, 232), (70, 70, 70), (102, 102, 156), (190, 153, 153), (153, 153, 153)),
    *((250, 170, 30), (220, 220, 0), (107, 142, 35), (152, 251, 152), (70, 130, 180), (220, 20, 60)),
    *((255, 0, 0), (0, 0, 142), (0, 0, 70), (0, 60, 100), (0, 80, 100), (0, 0, 230), (119, 11, 32)),
)

PALETTES: dict[str, dict[Colour, int]] = {
    "voc": {**voc_colours(21), (224, 224, 192): 255},
    "cityscapes": {**{colour: label for label, colour in enumerate(_CITYSCAPES)}, (0, 0, 0): 255},
}
"""Label of each colour, by the name of the palette: PASCAL VOC with its border, Cityscapes' 19 training classes."""


def read_mask(
    source: ImageSource,
    *,
    name: str | None = None,
    num_classes: int | None = None,
    ignore_index: int = 255,
    reduce_zero_label: bool = False,
    id_map: Mapping[int, int] | None = None,
    palette: Palette | None = None,
    image_size: tuple[int, int] | None = None,
) -> Tensor:
    """Read one mask file into labels, by the rules at the top of this module.

    Args:
        source: Path, bytes, mapping with `bytes` and `path`, or opened image, as for `read_image`.
        name: What an error calls the mask; the path, or the number of bytes, when None.
        num_classes: Number of classes; None leaves the range unchecked.
        ignore_index: Number of pixels that do not count, in the file and in the result.
        reduce_zero_label: 0 is no class but stands for ignored pixels, and the others count from 1 in the file, as in
            ADE20K: 0 becomes `ignore_index`, and every other label one less.
        id_map: Label of each number in the file; `ignore_index` needs no entry. A number that has none is refused.
        palette: Label of each colour, for masks that hold colours.
        image_size: Width and height in pixels that the mask must have, as `PIL.Image.Image.size` of its image.

    Returns:
        (H, W) int64: 0..num_classes - 1 or `ignore_index`.

    Raises:
        UserError: Naming the mask and the cause: as for `read_image`, or the file is lossy, has colours or several
            frames, a size that differs from its image, or numbers that are no labels.
    """
    with open_or_say(source, name, "mask") as image:
        values = stored_values(image, palette)
        _check_size(values, image_size)
        return mask_labels(
            values,
            num_classes=num_classes,
            ignore_index=ignore_index,
            reduce_zero_label=reduce_zero_label,
            id_map=id_map,
        )


def stored_values(image: Image.Image, palette: Palette | None = None) -> Tensor:
    """The numbers that an opened mask holds, upright, before any map.

    Returns:
        (H, W) int64, none of them negative. Colours are turned into labels by `palette`.

    Raises:
        UserError: The file cannot hold labels, by the rules at the top of this module.
    """
    _refuse_unfit(image)
    step = _grey_step(image)
    upright = ImageOps.exif_transpose(image)  # a copy, loaded
    if 0 in upright.size:
        raise UserError(f"a mask needs at least one pixel, this one is {upright.width}x{upright.height}; remove it")
    mode = upright.mode
    if mode in ("RGB", "RGBA"):
        return _labels_of_colours(upright, palette)
    if mode in ("P", "L"):
        return _pixels(upright, torch.uint8).long() // step
    if mode == "1":
        return _pixels(upright.convert("L"), torch.uint8).long() // 255
    if mode == "I" or mode.startswith("I;16"):
        values = _pixels(upright.convert("I"), torch.int32).long()
    elif mode == "F":
        floats = _pixels(upright, torch.float32)
        # Above 2**24 float32 no longer holds every whole number.
        if not bool(((floats == floats.round()) & (floats.abs() < 2**24)).all()):
            raise UserError("labels must be whole numbers, but it holds fractions; save it as 8 or 16 bit integers")
        values = floats.long()
    else:
        raise UserError(f"a mask of mode {mode} holds no labels; save one number per pixel (mode L, P or I;16) as PNG")
    if (low := int(values.min())) < 0:
        raise UserError(f"labels count from 0, but it holds {low}; write its ignored pixels as 255")
    return values


def mask_labels(
    values: Tensor,
    *,
    num_classes: int | None = None,
    ignore_index: int = 255,
    reduce_zero_label: bool = False,
    id_map: Mapping[int, int] | None = None,
) -> Tensor:
    """Labels from stored numbers; the arguments are those of `read_mask`.

    Args:
        values: (H, W) int64, none negative, as from `stored_values` or from a table's array.

    Returns:
        (H, W) int64.
    """
    if num_classes is not None and 0 <= ignore_index < num_classes:
        raise UserError(
            f"ignore_index {ignore_index} is also one of the {num_classes} classes; "
            f"choose one outside 0..{num_classes - 1}"
        )
    present, positions, counts = _present(values)
    labels = present.clone()
    ignored = present == ignore_index
    if id_map is not None:
        known = {int(number): int(label) for number, label in id_map.items()}
        missing = [v for v in present.tolist() if v not in known and v != ignore_index]
        if missing:
            shown = ", ".join(map(str, missing[:5]))
            raise UserError(
                f"it holds {shown}{' and more' if len(missing) > 5 else ''}, which id_map gives no label; is this the "
                "right flavour of ids?"
            )
        labels = torch.tensor([known.get(v, ignore_index) for v in present.tolist()], dtype=torch.int64)
        ignored = labels == ignore_index
    if reduce_zero_label:
        ignored = ignored | (labels == 0)
        labels = labels - 1
    labels[ignored] = ignore_index
    _check_range(present, labels, ignored, counts, num_classes, ignore_index, reduce_zero_label)
    return labels[positions]


def _refuse_unfit(image: Image.Image) -> None:
    """Files whose pixels, though Pillow opens them, are not the labels that were stored."""
    tags = getattr(image, "tag_v2", {})
    if image.format in _UNSAFE or "jpeg" in str(image.info.get("compression", "")):
        how = "compresses by changing values" if "JPEG" in str(image.format) else "may have changed values"
        raise UserError(f"{image.format} {how}, so that its labels cannot be trusted; make the mask again as PNG")
    if getattr(image, "n_frames", 1) > 1:
        raise UserError(f"it has {image.n_frames} frames, and a mask must be a single picture; save one of them")
    if tags.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
        raise UserError("it states that white is zero, so that its labels may be inverted; save it as PNG")
    codec, arguments = _raw(image)
    if codec.startswith("ppm") and arguments[-1] not in (255, 65535):
        raise UserError(f"it states a maximum of {arguments[-1]}, to which labels would be scaled; save it as PNG")
    if arguments[:1] == ("RGB;16B",) or arguments[:1] == ("RGBA;16B",):
        raise UserError("it holds 16 bit colours, not labels; save one number per pixel as PNG")


def _grey_step(image: Image.Image) -> int:
    """What Pillow multiplies 2 and 4 bit grey by."""
    rawmode = str((_raw(image)[1] or ("",))[0])
    return {"L;2": 85, "L;4": 17}.get(rawmode[:3], 1)


def _raw(image: Image.Image) -> tuple[str, tuple]:
    """Name of the decoder and its arguments; the first of them is how the pixels are stored. Empty once loaded."""
    tile = getattr(image, "tile", None)
    if not tile:
        return "", ()
    arguments = tile[0][3]
    return str(tile[0][0]), arguments if isinstance(arguments, tuple) else (arguments,)


def _labels_of_colours(image: Image.Image, palette: Palette | None) -> Tensor:
    """Labels (H, W) of a colour picture."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    pixels = pixels.view(image.height, image.width, len(image.mode)).long()
    if image.mode == "RGBA" and int(pixels[..., 3].min()) < 255:
        raise UserError("it is partly transparent, which is no label; save one number per pixel as PNG")
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    if palette is None:
        grey = bool((red == green).all() and (green == blue).all())
        cure = "save one of its three equal channels" if grey else "give the palette that maps colours to labels"
        raise UserError(f"it holds colours (mode {image.mode}) where labels are expected; {cure}")
    if palette == "panoptic":
        return red + 256 * green + 65536 * blue
    colours = _palette(palette)
    codes = (red * 256 + green) * 256 + blue
    present, positions = codes.unique(return_inverse=True)
    table = {(r * 256 + g) * 256 + b: label for (r, g, b), label in colours.items()}
    for code in present.tolist():
        if code not in table:
            colour = (code >> 16, code >> 8 & 255, code & 255)
            raise UserError(
                f"it holds colour {colour} in {int((codes == code).sum())} pixels, which is none of the palette's "
                f"{len(colours)}; is it the right palette, and was the mask resized or blurred?"
            )
    return torch.tensor([table[code] for code in present.tolist()])[positions]


def _palette(palette: Palette) -> Mapping[Colour, int]:
    if isinstance(palette, str):
        if palette not in PALETTES:
            raise UserError(f"there is no palette {palette!r}, expected one of {', '.join(PALETTES)}")
        return PALETTES[palette]
    if isinstance(palette, Mapping):
        return palette
    colours = {tuple(colour): label for label, colour in enumerate(palette)}
    if len(colours) < len(palette):
        raise UserError("the palette has a colour twice, which leaves open what it means; make its colours differ")
    return colours


def _pixels(image: Image.Image, dtype: torch.dtype) -> Tensor:
    """(H, W) values of a one-channel image."""
    return torch.frombuffer(bytearray(image.tobytes()), dtype=dtype).view(image.height, image.width)


def _present(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different numbers (K,), for each pixel which of them it has (H, W), and the number of pixels of each (K,)."""
    if int(values.max()) >= _MANY:
        return values.unique(return_inverse=True, return_counts=True)
    histogram = torch.bincount(values.flatten())
    present = histogram.nonzero()[:, 0]
    table = torch.zeros(len(histogram), dtype=torch.int64)
    table[present] = torch.arange(len(present))
    return present, table[values], histogram[present]


def _check_size(values: Tensor, image_size: tuple[int, int] | None) -> None:
    height, width = values.shape
    if image_size is None or image_size == (width, height):
        return
    turned = image_size == (height, width)
    cure = "one of the two is turned, perhaps by an EXIF orientation" if turned else "are the two a pair?"
    raise UserError(f"it has {width}x{height} pixels, but its image has {image_size[0]}x{image_size[1]}; {cure}")


def _check_range(
    present: Tensor,
    labels: Tensor,
    ignored: Tensor,
    counts: Tensor,
    num_classes: int | None,
    ignore_index: int,
    reduce_zero_label: bool,
) -> None:
    """Every label must be a class; the sentence tells the number as it stands in the file."""
    if num_classes is None:
        return
    wrong = ~ignored & ((labels < 0) | (labels >= num_classes))
    if not bool(wrong.any()):
        return
    first = int(wrong.nonzero()[0, 0])
    stored, label = int(present[first]), int(labels[first])
    became = f" (label {label})" if stored != label else ""
    allowed = f"1..{num_classes} with 0 for ignored pixels" if reduce_zero_label else f"0..{num_classes - 1}"
    raise UserError(
        f"it holds {stored}{became} in {int(counts[first])} pixels, and {int(wrong.sum())} such numbers in all, but "
        f"the labels of {num_classes} classes are {allowed}, and {ignore_index} is for ignored pixels; is this the "
        "right flavour of ids?"
    )
