"""The one image reader: whatever Pillow opens arrives upright, in RGB, 8 bit, at its right brightness.

The rules, by Pillow's mode after opening; every reader of pictures in this project goes through them:

    1, L, RGB, RGBX    grey is copied to three channels, the fourth channel of RGBX is dropped.
    P                  looked up in its palette.
    LA, PA, RGBA, La, RGBa, and a transparent colour stated for 1, L, I;16, P or RGB (PNG's tRNS, GIF)
                       composited on white (`BACKGROUND`), as a browser shows it.
    CMYK, YCbCr, HSV   Pillow's plain formulas.
    LAB                Pillow's conversion through littleCMS to sRGB.
    I;16 (any order)   0..65535 becomes 0..255, divided by 257 and rounded. A TIFF that states 12 bits runs 0..4095, and
                       one that states that white is zero is inverted; Pillow does neither.
    I                  16 bits as above where the format says so (PNG, PNM). Elsewhere, as in a 32 bit TIFF, nothing
                       states the range: values must lie in 0..65535 and count as 16 bit, and an image whose values
                       would all fit 8 bits is refused, since it would turn out almost black or be a guess.
    F                  must lie in 0..1 and is multiplied by 255; anything else, NaN included, is refused.

Values are checked before they are cast, so nothing wraps or clips silently. Orientation is taken from EXIF or XMP, as
Pillow reads it. Of animations and multi-page files the first frame counts. Pillow opens 16 bit colour PNG and TIFF as
8 bit by keeping the high byte, at most one step off rounding; their transparent colour is compared by its high byte
too. Colour profiles and PNG gamma are not applied, which is what timm and torchvision do as well.
"""

import io
import os
import struct
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from timm_locat.errors import UserError

__all__ = ["BACKGROUND", "ImageSource", "open_or_say", "read_image", "to_rgb8"]

BACKGROUND = (255, 255, 255)
"""Colour that shows through where an image is transparent."""

ImageSource = str | os.PathLike[str] | bytes | Mapping[str, object] | Image.Image

_PLAIN_MODES = ("1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_ALPHA_MODES = ("LA", "PA", "RGBA", "La", "RGBa")
_KEYED_MODES = ("1", "L", "P", "RGB")  # modes whose `info` may name a transparent colour that Pillow can apply
_WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")

# What Pillow's plugins raise on damaged files; seen while flipping and cutting bytes in 25 small files of 15 formats.
_BROKEN_FILE = (OSError, ValueError, SyntaxError, RuntimeError, TypeError, struct.error, Image.DecompressionBombError)

_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_SAMPLE_FORMAT = 258, 262, 339


def to_rgb8(image: Image.Image) -> Image.Image:
    """Upright 8 bit RGB version of any image that Pillow opens, by the rules at the top of this module.

    Args:
        image: An opened image of at least one pixel, its file still open if it has not been loaded. The transparent
            colour of a 2 or 4 bit grey or a 16 bit colour PNG is found only if the image has not been loaded yet.

    Returns:
        A new image of mode RGB, detached from the file and without its metadata.

    Raises:
        UserError: The mode is not one of those above, or the values lie outside the range that their mode has.
        OSError, SyntaxError, ...: Whatever Pillow raises while it decodes a damaged file; `read_image` turns that into
            a sentence.
    """
    key = _transparent_colour(image)
    stated = _stated_range(image)
    upright = ImageOps.exif_transpose(image)  # a copy, loaded
    if 0 in upright.size:
        raise UserError(f"an image needs at least one pixel, this one is {upright.width}x{upright.height}; remove it")
    if key is not None:
        upright.info["transparency"] = key
    if upright.mode in _WIDE_MODES:
        return _wide_to_rgb8(upright, *stated)
    if upright.mode == "F":
        return _float_to_rgb8(upright, stated[1])
    if upright.mode in _ALPHA_MODES or (upright.mode in _KEYED_MODES and upright.has_transparency_data):
        return _composite(upright)
    if upright.mode not in _PLAIN_MODES:
        known = ", ".join((*_PLAIN_MODES, *_ALPHA_MODES, *_WIDE_MODES, "F"))
        raise UserError(f"images of mode {upright.mode} are not understood; save it in one of the modes {known}")
    result = upright.convert("RGB")
    result.info.clear()
    return result


def read_image(source: ImageSource, *, name: str | None = None) -> Image.Image:
    """Read one image file into upright 8 bit RGB, by the rules at the top of this module.

    Args:
        source: Path of a file, the bytes of a file, or a mapping with `bytes` and `path` as the Image column of a
            `datasets` table gives it: `bytes` is used where it is not None, else `path` is opened. Or an opened image.
        name: What an error calls the image; the path, or the number of bytes, when None.

    Returns:
        (H, W) RGB image, detached from the file.

    Raises:
        UserError: Naming the image and the cause: there is no such file, Pillow cannot open it, it is damaged or cut
            short, it has more pixels than Pillow's limit against decompression bombs (twice
            `PIL.Image.MAX_IMAGE_PIXELS`, about 179 million), or its values do not fit the rules.
    """
    with open_or_say(source, name) as image:
        return to_rgb8(image)


@contextmanager
def open_or_say(source: ImageSource, name: str | None, what: str = "image") -> Iterator[Image.Image]:
    """An opened picture; whatever is wrong with it in here becomes one sentence that names it.

    Args:
        source: As for `read_image`.
        name: What an error calls it; the path, or the number of bytes, when None.
        what: What the picture is, in errors: `image` or `mask`.
    """
    content, name = _content_and_name(source, name, what)
    try:
        with warnings.catch_warnings():
            # Pillow warns of a large image (between its limit and twice that), of odd EXIF and of TIFF tags that it
            # skips. The image is either read whole or refused below, so that none of these asks for action.
            warnings.filterwarnings("ignore", module=r"PIL\.")
            with nullcontext(content) if isinstance(content, Image.Image) else Image.open(content) as image:
                yield image
    except FileNotFoundError as err:
        raise UserError(f"cannot read {what} {name}: there is no such file; check the path") from err
    except UserError as err:
        raise UserError(f"cannot read {what} {name}: {err}") from err
    except _BROKEN_FILE as err:
        cause = " ".join(str(err).split()) or type(err).__name__
        if isinstance(err, Image.UnidentifiedImageError):
            cause = "something that is no image or is damaged at its start"
        raise UserError(
            f"cannot read {what} {name}: expected a file that Pillow can open, got: {cause}; "
            "remove it or replace it by an intact copy"
        ) from err


def _content_and_name(
    source: ImageSource, name: str | None, what: str
) -> tuple[str | os.PathLike[str] | io.BytesIO | Image.Image, str]:
    """What `Image.open` is to open, unless it is an image already, and what to call it."""
    if isinstance(source, Image.Image):
        return source, name or "in memory"
    if isinstance(source, Mapping):
        path = source.get("path")
        source = source.get("bytes") if source.get("bytes") is not None else path
        name = name or (str(path) if path else None)
    if isinstance(source, bytes | bytearray | memoryview):
        return io.BytesIO(source), name or f"of {len(source)} bytes in memory"
    if not source or not isinstance(source, str | os.PathLike):
        got = f"an empty {type(source).__name__}" if source is not None and not source else type(source).__name__
        raise UserError(
            f"cannot read {what} {name or 'without a name'}: expected a path, bytes, or a mapping with one of "
            f"them, got {got}; fill the {what} in or remove it"
        )
    return source, name or os.fspath(source)


def _transparent_colour(image: Image.Image) -> int | bytes | tuple[int, ...] | None:
    """The colour that stands for transparent, in the values of the loaded pixels; None where there is none.

    PNG states it at the depth of the file, but Pillow scales the pixels of 2 and 4 bit grey up and keeps the high byte
    of 16 bit colour, and then finds no pixel equal to it.
    """
    key = image.info.get("transparency")
    tile = getattr(image, "tile", None)
    if key is None or image.format != "PNG" or not tile:
        return key
    depth = tile[0][3]
    if depth in ("L;2", "L;4"):
        return key * (85 if depth == "L;2" else 17)
    if depth == "RGB;16B":
        return tuple(value >> 8 for value in key)
    return key


def _stated_range(image: Image.Image) -> tuple[int | None, bool]:
    """Largest integer that the file's format allows (None: not stated), and whether the top of the range means black.

    Matters only for the modes that hold more than 8 bits.
    """
    tags = getattr(image, "tag_v2", None)  # only TIFF has them
    if image.mode not in (*_WIDE_MODES, "F") or tags is None:
        return (65535 if image.mode.startswith("I;16") or image.format in ("PNG", "PPM") else None), False
    bits = tags.get(_TIFF_BITS, (1,))[0]
    if image.mode == "I" and bits == 16 and tags.get(_TIFF_SAMPLE_FORMAT, (1,))[0] == 2:
        raise UserError("signed 16 bit values do not state which of them is white; save it as unsigned 16 bit")
    top = {12: 4095, 16: 65535}.get(bits)
    return top, tags.get(_TIFF_PHOTOMETRIC) == 0


def _wide_to_rgb8(image: Image.Image, top: int | None, top_is_black: bool) -> Image.Image:
    """Integers of more than 8 bits; `top` is the value of full brightness, or None where no format states it."""
    if image.mode == "I;16N":  # Pillow 12.3 converts it as if it had 8 bits
        image = Image.frombytes("I;16L" if sys.byteorder == "little" else "I;16B", image.size, image.tobytes())
    wide = image if image.mode == "I" else image.convert("I")
    values = _pixels(wide, torch.int32)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > (top or 65535):
        raise UserError(
            f"values of mode {image.mode} must lie in 0..{top or 65535}, these lie in {low}..{high}; "
            "scale them or save it with 8 bits"
        )
    if top is None and 0 < high <= 255:
        raise UserError(
            f"values of mode {image.mode} count as 16 bit, but these lie in {low}..{high} and look like 8 bit; "
            "save it with 8 bits, or as a 16 bit PNG if it is that dark"
        )
    top = top or 65535
    grey = (values * 255 + top // 2) // top  # 65535 * 255 + 32767 < 2**31, so int32 is enough
    rgb = _grey_image(255 - grey if top_is_black else grey).convert("RGB")
    key = image.info.get("transparency")
    if key is None:
        return rgb
    return Image.composite(rgb, Image.new("RGB", rgb.size, BACKGROUND), _grey_image((values != key) * 255))


def _float_to_rgb8(image: Image.Image, top_is_black: bool) -> Image.Image:
    """Floating-point values in 0..1, where 1 is full brightness, or black where the format says so."""
    values = _pixels(image, torch.float32)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 1):  # also catches NaN, which torch's min and max pass on
        raise UserError(f"values of mode F must lie in 0..1, these lie in {low:g}..{high:g}; scale them first")
    return _grey_image(((1 - values if top_is_black else values) * 255).round()).convert("RGB")


def _composite(image: Image.Image) -> Image.Image:
    """Lay an image with transparency on `BACKGROUND`."""
    if image.mode == "La":
        image = image.convert("LA")  # Pillow has no direct way from La to RGBA
    layer = image.convert("RGBA")
    canvas = Image.new("RGB", layer.size, BACKGROUND)
    canvas.paste(layer, mask=layer)
    return canvas


def _pixels(image: Image.Image, dtype: torch.dtype) -> Tensor:
    """(H, W) values of a one-channel image of mode I (int32) or F (float32)."""
    return torch.frombuffer(bytearray(image.tobytes()), dtype=dtype).view(image.height, image.width)


def _grey_image(values: Tensor) -> Image.Image:
    """(H, W) values, whole numbers in 0..255, as an image of mode L."""
    return F.to_pil_image(values.to(torch.uint8)[None])
