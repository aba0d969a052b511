"""The image reader against plain arithmetic on single pixels, and against the EXIF standard's words."""

import io
import struct
import zlib

import pytest
from PIL import Image

from timm_locat.data import read_image, to_rgb8
from timm_locat.errors import UserError

WIDTH, HEIGHT = 3, 2


def file_of(image, extension="png", **options):
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, extension, **options)
    return buffer.getvalue()


def png(width, height, depth, colour_type, rows, *, transparent=None):
    """A PNG written by hand, for what Pillow does not write: depth, colour type and tRNS as given."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    key = chunk(b"tRNS", transparent) if transparent else b""
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + key + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def pixels(image):
    """RGB triples, row by row."""
    assert image.mode == "RGB"
    return [image.getpixel((x, y)) for y in range(image.height) for x in range(image.width)]


def greys(image):
    assert all(r == g == b for r, g, b in pixels(image))
    return [r for r, _, _ in pixels(image)]


def assert_close(colour, expected, tolerance):
    assert max(abs(a - b) for a, b in zip(colour, expected, strict=True)) <= tolerance, colour


@pytest.mark.parametrize(
    ("mode", "value", "expected", "tolerance"),
    [
        ("1", 0, (0, 0, 0), 0),
        ("1", 255, (255, 255, 255), 0),
        ("L", 77, (77, 77, 77), 0),
        ("LA", (77, 255), (77, 77, 77), 0),
        ("LA", (77, 0), (255, 255, 255), 0),
        ("LA", (0, 51), (204, 204, 204), 0),
        ("La", (51, 51), (255, 255, 255), 0),
        ("RGB", (10, 20, 30), (10, 20, 30), 0),
        ("RGBX", (10, 20, 30, 99), (10, 20, 30), 0),
        ("RGBA", (10, 20, 30, 255), (10, 20, 30), 0),
        ("RGBA", (200, 100, 0, 51), (244, 224, 204), 0),  # 200 * 0.2 + 255 * 0.8
        ("RGBa", (40, 20, 0, 51), (244, 224, 204), 0),
        ("CMYK", (255, 0, 0, 0), (0, 255, 255), 0),
        ("CMYK", (0, 0, 0, 255), (0, 0, 0), 0),
        ("YCbCr", (128, 128, 128), (128, 128, 128), 0),
        ("YCbCr", (76, 85, 255), (255, 0, 0), 2),
        ("LAB", (255, 128, 128), (255, 255, 255), 1),
        ("LAB", (138, 209, 198), (255, 0, 0), 6),  # sRGB red under D50 is L 54.3, a 80.8, b 69.9
        ("HSV", (0, 255, 255), (255, 0, 0), 0),
        ("HSV", (85, 255, 255), (0, 255, 0), 0),
        ("I;16", 25700, (100, 100, 100), 0),
        ("I;16L", 25700, (100, 100, 100), 0),
        ("I;16B", 25700, (100, 100, 100), 0),
        ("I;16N", 25700, (100, 100, 100), 0),
        ("I;16", 200, (1, 1, 1), 0),
        ("I", 25700, (100, 100, 100), 0),
        ("I", 0, (0, 0, 0), 0),
        ("F", 0.4, (102, 102, 102), 0),
        ("F", 1.0, (255, 255, 255), 0),
    ],
)
def test_every_mode_arrives_at_its_right_colour(mode, value, expected, tolerance):
    result = to_rgb8(Image.new(mode, (WIDTH, HEIGHT), value))
    assert result.size == (WIDTH, HEIGHT)
    for colour in pixels(result):
        assert_close(colour, expected, tolerance)


@pytest.mark.parametrize(
    ("mode", "value", "extension", "expected", "tolerance"),
    [
        ("1", 255, "png", (255, 255, 255), 0),
        ("LA", (0, 51), "png", (204, 204, 204), 0),
        ("PA", 0, "tiff", (255, 255, 255), 0),
        ("RGBA", (200, 100, 0, 51), "webp", (244, 224, 204), 3),
        ("CMYK", (255, 0, 0, 0), "jpeg", (0, 255, 255), 3),
        ("CMYK", (255, 0, 0, 0), "tiff", (0, 255, 255), 0),
        ("YCbCr", (76, 85, 255), "jpeg", (255, 0, 0), 3),
        ("LAB", (255, 128, 128), "tiff", (255, 255, 255), 1),
        ("I;16", 25700, "png", (100, 100, 100), 0),
        ("I;16", 200, "png", (1, 1, 1), 0),
        ("I;16", 25700, "tiff", (100, 100, 100), 0),
        ("I;16B", 25700, "tiff", (100, 100, 100), 0),
        ("I;16", 200, "ppm", (1, 1, 1), 0),
        ("I", 25700, "tiff", (100, 100, 100), 0),
        ("F", 0.4, "tiff", (102, 102, 102), 0),
    ],
)
def test_every_mode_arrives_at_its_right_colour_from_a_file(tmp_path, mode, value, extension, expected, tolerance):
    path = tmp_path / f"image.{extension}"
    Image.new(mode, (WIDTH, HEIGHT), value).save(path)
    for colour in pixels(read_image(path)):
        assert_close(colour, expected, tolerance)


@pytest.mark.parametrize("extension", ["png", "tiff", "ppm"])
def test_a_16_bit_gradient_keeps_its_brightness(extension):
    values = [round(65535 * i / 13) for i in range(14)]
    gradient = Image.frombytes("I;16", (7, 2), struct.pack("<14H", *values))
    assert greys(read_image(file_of(gradient, extension))) == [round(value / 257) for value in values]


def test_a_12_bit_tiff_is_as_bright_as_the_same_picture_in_16_bit():
    packed = bytes([0xFF, 0xF8, 0x00, 0x00, 0x01, 0x00])  # 4095, 2048, 0 and 256 of 12 bits each
    header = struct.pack("<2sHLH", b"II", 42, 8, 8)
    tags = [(256, 4), (257, 1), (258, 12), (259, 1), (262, 1), (273, 8 + 2 + 8 * 12 + 4), (278, 1), (279, 6)]
    directory = b"".join(struct.pack("<HHLHH", tag, 3, 1, value, 0) for tag, value in tags)
    tiff = header + directory + struct.pack("<L", 0) + packed
    assert Image.open(io.BytesIO(tiff)).mode == "I;16"
    assert greys(read_image(tiff)) == [255, round(2048 * 255 / 4095), 0, round(256 * 255 / 4095)]


@pytest.mark.parametrize(("mode", "value", "expected"), [("I;16", 25700, 155), ("F", 0.4, 153)])
def test_a_tiff_whose_zero_is_white_is_inverted(mode, value, expected):
    tiff = file_of(Image.new(mode, (WIDTH, HEIGHT), value), "tiff", tiffinfo={262: 0})
    assert set(greys(read_image(tiff))) == {expected}


def test_16_bit_colour_keeps_the_high_byte():
    image = png(2, 1, 16, 2, [struct.pack(">6H", 25700, 0, 65535, 511, 512, 513)])
    assert pixels(read_image(image)) == [(100, 0, 255), (1, 2, 2)]


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (Image.new("I", (WIDTH, HEIGHT), 65536), r"must lie in 0\.\.65535, these lie in 65536\.\.65536"),
        (Image.new("I", (WIDTH, HEIGHT), -1), r"must lie in 0\.\.65535, these lie in -1\.\.-1"),
        (Image.new("I", (WIDTH, HEIGHT), 255), r"look like 8 bit"),
        (Image.new("F", (WIDTH, HEIGHT), 255.0), r"must lie in 0\.\.1, these lie in 255\.\.255"),
        (Image.new("F", (WIDTH, HEIGHT), -0.1), r"must lie in 0\.\.1"),
        (Image.new("F", (WIDTH, HEIGHT), float("nan")), r"must lie in 0\.\.1, these lie in nan"),
        (Image.new("L", (0, 2)), r"at least one pixel, this one is 0x2"),
    ],
)
def test_values_that_could_be_read_in_two_ways_are_refused(image, why):
    with pytest.raises(UserError, match=why):
        to_rgb8(image)


def test_one_nan_among_good_floats_is_refused():
    image = Image.new("F", (WIDTH, HEIGHT), 0.5)
    image.putpixel((1, 1), float("nan"))
    with pytest.raises(UserError, match="these lie in nan"):
        to_rgb8(image)


def test_signed_16_bit_is_refused_since_its_white_is_not_stated():
    tiff = bytearray(file_of(Image.new("I;16", (WIDTH, HEIGHT), 9), "tiff", tiffinfo={339: 2}))
    with pytest.raises(UserError, match="signed 16 bit values do not state"):
        read_image(bytes(tiff))


def palette_image():
    image = Image.new("P", (WIDTH, HEIGHT), 1)
    image.putpalette([255, 0, 0, 0, 0, 100])  # entry 0 is red, entry 1 dark blue
    image.putpixel((2, 0), 0)
    return image


@pytest.mark.parametrize("extension", ["png", "gif", "tiff"])
def test_palettes_are_looked_up(extension):
    blue, red = (0, 0, 100), (255, 0, 0)
    assert pixels(read_image(file_of(palette_image(), extension))) == [blue, blue, red, blue, blue, blue]


@pytest.mark.parametrize(("extension", "transparent"), [("png", 1), ("gif", 1), ("png", b"\xff\x00")])
def test_a_transparent_palette_entry_shows_white(extension, transparent):
    image = file_of(palette_image(), extension, transparency=transparent)
    white, red = (255, 255, 255), (255, 0, 0)
    assert pixels(read_image(image)) == [white, white, red, white, white, white]


def test_a_half_transparent_palette_entry_is_mixed_with_white():
    image = file_of(palette_image(), transparency=bytes([255, 51]))
    assert pixels(read_image(image))[0] == (204, 204, 224)  # 0.2 of (0, 0, 100) and 0.8 of 255


@pytest.mark.parametrize(
    ("depth", "row", "transparent", "expected"),
    [
        (1, bytes([0b10100000]), 0, [255, 255, 255]),
        (2, bytes([0b00011000]), 1, [0, 255, 170]),
        (4, bytes([0x05, 0xF0]), 5, [0, 255, 255]),
        (8, bytes([0, 5, 170]), 5, [0, 255, 170]),
        (16, struct.pack(">3H", 0, 1285, 25700), 1285, [0, 255, 100]),
    ],
)
def test_the_transparent_grey_of_a_png_shows_white_at_every_depth(depth, row, transparent, expected):
    image = png(3, 1, depth, 0, [row], transparent=struct.pack(">H", transparent))
    assert greys(read_image(image)) == expected


@pytest.mark.parametrize(("depth", "layout", "low_byte"), [(8, "B", None), (16, "H", 99)])
def test_the_transparent_colour_of_a_png_shows_white(depth, layout, low_byte):
    values = [value if low_byte is None else 256 * value + low_byte for value in (10, 20, 30, 10, 20, 31)]
    image = png(2, 1, depth, 2, [struct.pack(f">6{layout}", *values)], transparent=struct.pack(">3H", *values[:3]))
    assert pixels(read_image(image)) == [(255, 255, 255), (10, 20, 31)]


# EXIF 2.3, tag 274: the side of the upright picture at which the stored row 0 and the stored column 0 lie.
SIDES = {
    1: ("top", "left"),
    2: ("top", "right"),
    3: ("bottom", "right"),
    4: ("bottom", "left"),
    5: ("left", "top"),
    6: ("right", "top"),
    7: ("right", "bottom"),
    8: ("left", "bottom"),
}


def stored_as(upright, orientation):
    """The picture as a camera stores it: placed pixel by pixel from the words of the standard."""
    row_side, column_side = SIDES[orientation]
    turned = row_side in ("left", "right")
    stored = Image.new("RGB", (upright.height, upright.width) if turned else upright.size)
    for row in range(stored.height):
        for column in range(stored.width):
            place = {}
            for side, index in ((row_side, row), (column_side, column)):
                axis, length = ("y", upright.height) if side in ("top", "bottom") else ("x", upright.width)
                place[axis] = index if side in ("top", "left") else length - 1 - index
            stored.putpixel((column, row), upright.getpixel((place["x"], place["y"])))
    return stored


@pytest.mark.parametrize("extension", ["png", "tiff", "webp", "jpeg"])
@pytest.mark.parametrize("orientation", SIDES)
def test_images_arrive_upright(extension, orientation):
    upright = Image.new("RGB", (32, 16))
    upright.paste((255, 0, 0), (0, 0, 8, 8))  # red in the corner at the top left
    upright.paste((0, 0, 255), (24, 0, 32, 8))  # blue at the top right
    exif = Image.Exif()
    exif[274] = orientation
    options = {"quality": 95, "subsampling": 0} if extension == "jpeg" else {}
    options |= {"lossless": True} if extension == "webp" else {}
    result = read_image(file_of(stored_as(upright, orientation), extension, exif=exif, **options))
    assert result.size == upright.size and 274 not in result.getexif()
    for corner in ((2, 2), (29, 2), (2, 13), (29, 13)):
        assert_close(result.getpixel(corner), upright.getpixel(corner), 4 if extension == "jpeg" else 0)


@pytest.mark.parametrize("extension", ["gif", "png", "webp", "tiff"])
def test_of_several_frames_the_first_is_read(extension):
    first, second = Image.new("RGB", (WIDTH, HEIGHT), (255, 0, 0)), Image.new("RGB", (WIDTH, HEIGHT), (0, 0, 255))
    image = file_of(first, extension, save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(image)).n_frames == 2
    assert_close(read_image(image).getpixel((1, 1)), (255, 0, 0), 1)


def test_the_result_is_a_plain_picture_without_metadata(tmp_path):
    path = tmp_path / "image.png"
    Image.new("RGB", (WIDTH, HEIGHT)).save(path, dpi=(72, 72))
    result = read_image(path)
    assert type(result) is Image.Image and result.info == {}


def test_the_given_image_is_left_as_it_was():
    image = Image.new("I;16", (WIDTH, HEIGHT), 25700)
    to_rgb8(image)
    assert image.mode == "I;16" and image.getpixel((0, 0)) == 25700


def test_paths_bytes_and_table_cells_give_the_same_picture(tmp_path):
    path = tmp_path / "image.png"
    palette_image().save(path)
    content = path.read_bytes()
    cells = [{"bytes": content, "path": None}, {"bytes": content, "path": "gone.png"}, {"bytes": None, "path": path}]
    results = [read_image(source) for source in (path, str(path), content, *cells)]
    assert all(pixels(result) == pixels(results[0]) for result in results)


@pytest.mark.parametrize("empty", [None, b"", "", {"bytes": None, "path": None}])
def test_a_missing_image_is_named(empty):
    with pytest.raises(UserError, match=r"cannot read image row 7: "):
        read_image(empty, name="row 7")


def test_a_cut_off_jpeg_is_named_with_its_cause(tmp_path):
    path = tmp_path / "cut.jpg"
    content = file_of(Image.effect_noise((40, 30), 80), "jpeg")
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"cannot read image .*cut\.jpg: .* got: .*truncated.*; remove it") as caught:
        read_image(path)
    assert "\n" not in str(caught.value)


def test_a_text_file_named_jpg_is_named(tmp_path):
    path = tmp_path / "notes.jpg"
    path.write_text("no picture")
    with pytest.raises(UserError, match=r"notes\.jpg: expected a file that Pillow can open, got: something that is no"):
        read_image(path)


def test_a_path_that_leads_nowhere_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.jpg: there is no such file"):
        read_image(tmp_path / "gone.jpg")


def test_an_image_beyond_pillows_limit_is_refused_and_a_large_one_below_it_is_read_without_warning(monkeypatch):
    image = file_of(Image.new("RGB", (10, 10)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)
    assert read_image(image).size == (10, 10)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    with pytest.raises(UserError, match=r"cannot read image big\.png: .*exceeds limit"):
        read_image(image, name="big.png")
