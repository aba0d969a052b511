"""The mask reader: what arrives is what was stored, or one sentence says why not."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from timm_locat.data.masks import PALETTES, read_mask
from timm_locat.errors import UserError

LABELS = [[0, 1, 2], [3, 255, 20]]
EXIF_ORIENTATION = 0x0112


def image_of(labels, mode="L", dtype=np.uint8):
    array = np.array(labels, dtype)
    if mode == "P":
        image = Image.fromarray(array)
        image.putpalette([channel for label in range(256) for channel in (255 - label, 7, label * 3 % 256)])
        return image
    return Image.fromarray(array)


def file_of(image, extension="PNG", **options):
    content = io.BytesIO()
    image.save(content, extension, **options)
    return content.getvalue()


def grey_png(depth, rows):
    """A grey PNG of 1, 2 or 4 bits; Pillow does not write the latter two."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    per_byte = 8 // depth
    packed = b""
    for row in rows:
        padded = [*row, *[0] * (-len(row) % per_byte)]
        bytes_ = [
            sum(v << (8 - depth * (i + 1)) for i, v in enumerate(padded[at : at + per_byte]))
            for at in range(0, len(padded), per_byte)
        ]
        packed += b"\0" + bytes(bytes_)
    header = struct.pack(">IIBBBBB", len(rows[0]), len(rows), depth, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(packed)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("mode", ["L", "P"])
@pytest.mark.parametrize("extension", ["PNG", "TIFF", "BMP"])
def test_eight_bit_masks_give_their_numbers_and_never_their_colours(mode, extension):
    got = read_mask(file_of(image_of(LABELS, mode), extension))
    assert got.dtype == torch.int64 and got.tolist() == LABELS


@pytest.mark.parametrize("extension", ["PNG", "TIFF"])
def test_sixteen_bit_masks_keep_numbers_above_255(extension):
    labels = [[0, 300, 65535], [256, 1, 255]]
    got = read_mask(file_of(Image.fromarray(np.array(labels, np.uint16)), extension), ignore_index=65535)
    assert got.tolist() == labels


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_grey_of_few_bits_is_not_spread_over_the_range(depth):
    rows = [[0, 1, 2**depth - 1], [2**depth - 1, 0, 1]]
    assert read_mask(grey_png(depth, rows)).tolist() == rows


def test_one_bit_masks_hold_zero_and_one():
    assert read_mask(file_of(image_of([[0, 255]]).convert("1"))).tolist() == [[0, 1]]


def test_masks_are_turned_as_their_images_are():
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6  # stored lying on its left side: turn clockwise
    got = read_mask(file_of(image_of(LABELS), exif=exif))
    assert got.tolist() == [[3, 0], [255, 1], [20, 2]]


def test_floats_are_labels_only_where_they_are_whole():
    assert read_mask(file_of(Image.fromarray(np.float32([[0, 7]])), "TIFF")).tolist() == [[0, 7]]
    for wrong in ([[0.5, 1]], [[float("nan"), 1]], [[float("inf"), 1]]):
        with pytest.raises(UserError, match="whole numbers"):
            read_mask(file_of(Image.fromarray(np.float32(wrong)), "TIFF"))


def test_reducing_the_zero_label_ignores_zero_and_moves_the_rest():
    got = read_mask(file_of(image_of([[0, 1, 150, 255]])), num_classes=150, reduce_zero_label=True)
    assert got.tolist() == [[255, 0, 149, 255]]


def test_an_id_map_gives_each_number_its_label():
    got = read_mask(file_of(image_of([[7, 8, 0, 255]])), id_map={7: 0, 8: 1, 0: 255}, num_classes=2)
    assert got.tolist() == [[0, 1, 255, 255]]


def test_an_id_map_reads_large_numbers_too():
    values = np.array([[70_000, 5]], np.int32)
    assert read_mask(Image.fromarray(values), id_map={70_000: 1, 5: 0}, num_classes=2).tolist() == [[1, 0]]


def test_a_number_without_a_label_is_refused():
    with pytest.raises(UserError, match=r"cannot read mask a\.png: it holds 9, which id_map gives no label"):
        read_mask(file_of(image_of([[7, 9]])), name="a.png", id_map={7: 0})


@pytest.mark.parametrize(
    ("labels", "options", "says"),
    [
        ([[0, 21]], {"num_classes": 21}, r"it holds 21 in 1 pixels.* 0\.\.20"),
        ([[0, 151]], {"num_classes": 150, "reduce_zero_label": True}, r"it holds 151 \(label 150\).* 1\.\.150"),
        ([[3, 3]], {"num_classes": 2, "id_map": {3: 2}}, r"it holds 3 \(label 2\) in 2 pixels"),
        ([[0, 254]], {"num_classes": 150, "reduce_zero_label": True}, r"it holds 254"),
    ],
)
def test_numbers_out_of_range_are_named_as_they_are_stored(labels, options, says):
    with pytest.raises(UserError, match=says):
        read_mask(file_of(image_of(labels)), **options)


def test_negative_numbers_are_refused():
    with pytest.raises(UserError, match="it holds -1"):
        read_mask(file_of(Image.fromarray(np.array([[-1, 0]], np.int32)), "TIFF"))


def test_ignore_index_may_not_be_a_class():
    with pytest.raises(UserError, match="ignore_index 3 is also one of the 5 classes"):
        read_mask(file_of(image_of([[0]])), num_classes=5, ignore_index=3)


def test_sizes_must_agree_with_the_image():
    content = file_of(image_of(LABELS))
    assert read_mask(content, image_size=(3, 2)).shape == (2, 3)
    with pytest.raises(UserError, match=r"has 3x2 pixels, but its image has 2x3; one of the two is turned"):
        read_mask(content, image_size=(2, 3))
    with pytest.raises(UserError, match=r"has 3x2 pixels, but its image has 4x2; are the two a pair"):
        read_mask(content, image_size=(4, 2))


def test_colours_need_a_palette():
    colours = Image.fromarray(np.array([[[128, 0, 0], [0, 0, 0], [224, 224, 192]]], np.uint8))
    with pytest.raises(UserError, match=r"holds colours.*give the palette"):
        read_mask(file_of(colours))
    assert read_mask(file_of(colours), palette="voc").tolist() == [[1, 0, 255]]
    assert read_mask(file_of(colours.convert("RGBA")), palette="voc").tolist() == [[1, 0, 255]]
    assert read_mask(file_of(colours), palette=[(0, 0, 0), (224, 224, 192), (128, 0, 0)]).tolist() == [[2, 0, 1]]
    with pytest.raises(UserError, match=r"colour \(128, 0, 0\) in 1 pixels, which is none of the palette's 20"):
        read_mask(file_of(colours), palette="cityscapes")
    with pytest.raises(UserError, match="no palette 'vok', expected one of voc, cityscapes"):
        read_mask(file_of(colours), palette="vok")


def test_three_equal_channels_are_told_from_colours():
    with pytest.raises(UserError, match="one of its three equal channels"):
        read_mask(file_of(image_of(LABELS).convert("RGB")))


def test_transparency_is_no_label():
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 9))
    with pytest.raises(UserError, match="partly transparent"):
        read_mask(file_of(clear), palette="voc")
    with pytest.raises(UserError, match="a mask of mode LA holds no labels"):
        read_mask(file_of(Image.new("LA", (2, 2))))


def test_the_voc_palette_is_the_published_one():
    # Colours of aeroplane, bicycle, person and tvmonitor in the VOC development kit.
    published = {1: (128, 0, 0), 2: (0, 128, 0), 15: (192, 128, 128), 20: (0, 64, 128)}
    assert {PALETTES["voc"][colour]: colour for colour in published.values()} == published


@pytest.mark.parametrize("extension", ["JPEG", "WEBP", "JPEG2000", "AVIF", "GIF"])
def test_files_that_change_labels_are_refused(extension):
    mask = image_of(np.zeros((16, 16)))
    mask = mask if extension in ("JPEG", "JPEG2000") else mask.convert("RGB")
    with pytest.raises(UserError, match=f"{extension}.* cannot be trusted"):
        read_mask(file_of(mask, extension), palette="voc")


def test_jpeg_inside_a_tiff_is_refused():
    with pytest.raises(UserError, match="cannot be trusted"):
        read_mask(file_of(image_of(np.zeros((16, 16))), "TIFF", compression="jpeg"))


def test_several_frames_are_refused():
    frames = [image_of([[0, 1]]), image_of([[1, 0]])]
    with pytest.raises(UserError, match="it has 2 frames"):
        read_mask(file_of(frames[0], "TIFF", save_all=True, append_images=frames[1:]))


def test_a_pgm_whose_labels_would_be_scaled_is_refused():
    with pytest.raises(UserError, match="maximum of 20"):
        read_mask(b"P5 3 1 20\n" + bytes([0, 1, 20]))
    assert read_mask(b"P5 3 1 255\n" + bytes([0, 1, 20])).tolist() == [[0, 1, 20]]
    assert read_mask(b"P2 3 1 255\n0 1 20\n").tolist() == [[0, 1, 20]]


def test_a_tiff_whose_white_is_zero_is_refused():
    with pytest.raises(UserError, match="white is zero"):
        read_mask(file_of(image_of(LABELS), "TIFF", tiffinfo={262: 0}))


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n"])
def test_damaged_files_are_named(content, tmp_path):
    path = tmp_path / "m.png"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read mask .*m\.png"):
        read_mask(path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read mask .*none\.png: there is no such file"):
        read_mask(tmp_path / "none.png")


def test_a_cut_file_is_named(tmp_path):
    content = file_of(image_of(np.random.default_rng(0).integers(0, 9, (60, 60))))
    with pytest.raises(UserError, match=r"cannot read mask half\.png"):
        read_mask(content[: len(content) // 2], name="half.png")
