"""Padding, the evaluation transform and decoding whole sets, against indexing by hand."""

import pickle

import pytest
import torch
from PIL import Image
from timm.data import create_transform

from timm_locat.data import DATASETS, decode_all, eval_transform, load, pad32_rgb, permute_patches
from timm_locat.errors import UserError


def random_pixels(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(28, 28), (5, 28, 28), (1, 28, 28), (5, 1, 28, 28), (2, 5, 1, 28, 28)])
def test_grey_images_keep_every_pixel_in_each_channel_inside_a_black_frame(shape):
    images = random_pixels(*shape)
    result = pad32_rgb(images)
    batch = shape[:-3] if 1 in shape else shape[:-2]
    assert result.dtype == torch.uint8 and result.shape == (*batch, 3, 32, 32)
    for channel in range(3):
        assert torch.equal(result[..., channel, 2:30, 2:30].flatten(), images.flatten())
    framed = result.clone()
    framed[..., 2:30, 2:30] = 0
    assert framed.max() == 0


@pytest.mark.parametrize("batch", [(), (5,)])
def test_colour_images_keep_their_channels(batch):
    images = random_pixels(*batch, 3, 28, 28)
    assert torch.equal(pad32_rgb(images)[..., 2:30, 2:30], images)


def test_padded_channels_do_not_share_memory():
    result = pad32_rgb(torch.zeros(28, 28, dtype=torch.uint8))
    result[0] = 9
    assert result[1:].max() == 0


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(1, 27, 28, dtype=torch.uint8),
        torch.zeros(3, 32, 32, dtype=torch.uint8),
        torch.zeros(28, dtype=torch.uint8),
        torch.zeros(1, 28, 28),
    ],
)
def test_padding_refuses_other_sizes_and_types(images):
    with pytest.raises(UserError, match="expected uint8 images of 28x28, got"):
        pad32_rgb(images)


def picture(width, height):
    return Image.frombytes("RGB", (width, height), random_pixels(height, width, 3).numpy().tobytes())


def as_tensor(image):
    return (
        torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        .view(image.height, image.width, 3)
        .permute(2, 0, 1)
    )


def test_an_image_of_the_right_size_is_left_as_it_is():
    image = picture(width=12, height=8)
    assert torch.equal(eval_transform((8, 12), 0.5, "bicubic")(image), as_tensor(image))


@pytest.mark.parametrize(("size", "img_size"), [((40, 30), (16, 16)), ((30, 40), (16, 24)), ((9, 20), (16, 16))])
@pytest.mark.parametrize("crop_pct", [0.875, 1.0])
def test_other_sizes_are_resized_and_cropped_as_timm_does(size, img_size, crop_pct):
    image = picture(*size)
    result = eval_transform(img_size, crop_pct, "bicubic")(image)
    timms = create_transform((3, *img_size), crop_pct=crop_pct, interpolation="bicubic", mean=(0,) * 3, std=(1,) * 3)
    assert result.dtype == torch.uint8 and result.shape == (3, *img_size)
    torch.testing.assert_close(result / 255, timms(image))


def test_the_crop_is_the_centre_of_the_resized_image():
    image = picture(width=32, height=16)
    result = eval_transform((8, 8), 0.5, "nearest")(image)  # the short side is already 16, so only the crop is left
    assert torch.equal(result, as_tensor(image)[:, 4:12, 12:20])


def test_the_native_transform_comes_first():
    entry = DATASETS["fashion_mnist_mini"]
    image = Image.frombytes("L", (28, 28), random_pixels(28, 28).numpy().tobytes()).convert("RGB")
    same = eval_transform((32, 32), 0.9, "bicubic", native_transform=entry.native_transform)
    assert torch.equal(same(image), pad32_rgb(as_tensor(image)))
    larger = eval_transform((64, 64), 1.0, "nearest", native_transform=entry.native_transform)
    doubled = pad32_rgb(as_tensor(image)).repeat_interleave(2, -1).repeat_interleave(2, -2)
    assert torch.equal(larger(image), doubled)


def test_the_evaluation_transform_survives_pickling():
    transform = eval_transform((8, 8), 0.9, "bilinear", native_transform=pad32_rgb)
    image = picture(28, 28)
    assert torch.equal(pickle.loads(pickle.dumps(transform))(image), transform(image))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (((8, 0), 0.9, "bicubic"), "img_size must be two positive numbers"),
        (((8, 8, 8), 0.9, "bicubic"), "img_size must be two positive numbers"),
        (((8, 8), 0, "bicubic"), r"crop_pct must lie in \(0, 1\], got 0"),
        (((8, 8), 1.1, "bicubic"), "crop_pct must lie"),
        (((8, 8), 0.9, "random"), "interpolation must be one of nearest, .*, got 'random'"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, why):
    with pytest.raises(UserError, match=why):
        eval_transform(*arguments)


@pytest.fixture
def folder(tmp_path):
    """Two images of 6x4 in two classes."""
    for name, grey in (("a", 10), ("b", 20)):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("L", (6, 4), grey).save(tmp_path / "train" / name / "0.png")
    return tmp_path


def test_decoding_a_set_gives_its_images_and_labels_in_order(folder):
    images, labels = decode_all(load(folder), eval_transform((4, 6), 1.0, "bicubic"))
    assert images.shape == (2, 3, 4, 6) and images.dtype == torch.uint8
    assert images.flatten(1).unique(dim=1).tolist() == [[10], [20]]
    assert labels.tolist() == [0, 1] and labels.dtype == torch.int64


def test_decoding_shows_a_bar_only_when_asked(folder, capsys):
    transform = eval_transform((4, 6), 1.0, "bicubic")
    decode_all(load(folder), transform)
    assert capsys.readouterr().err == ""
    decode_all(load(folder), transform, progress=True)
    assert "decoding" in capsys.readouterr().err


def test_a_set_too_large_for_memory_is_refused(folder, monkeypatch):
    monkeypatch.setattr("timm_locat.data.transforms.MAX_DECODED_BYTES", 2 * 3 * 4 * 6 - 1)
    with pytest.raises(UserError, match=r"2 images of shape \(3, 4, 6\) take .* GiB, more than"):
        decode_all(load(folder), eval_transform((4, 6), 1.0, "bicubic"))


def test_an_image_that_comes_out_in_another_size_is_named(folder):
    Image.new("L", (5, 4)).save(folder / "train" / "b" / "0.png")
    with pytest.raises(UserError, match=r"b/0\.png becomes torch\.uint8 of shape \(3, 4, 5\), expected"):
        decode_all(load(folder), as_tensor)


def test_a_damaged_image_is_named_while_decoding(folder):
    (folder / "train" / "b" / "0.png").write_text("no picture")
    with pytest.raises(UserError, match=r"cannot read image .*b/0\.png"):
        decode_all(load(folder), as_tensor)


def test_the_embedded_test_set_decodes_to_the_stated_mean():
    entry = DATASETS["fashion_mnist_mini"]
    transform = eval_transform((32, 32), 1.0, "bicubic", native_transform=entry.native_transform)
    images, labels = decode_all(load("fashion_mnist_mini", "test"), transform)
    assert images.shape == (1000, 3, 32, 32) and labels.bincount().tolist() == [100] * 10
    stored = images[..., 2:30, 2:30] / 255
    assert stored.mean() == pytest.approx(entry.mean[0], abs=0.01)
    assert stored.std() == pytest.approx(entry.std[0], abs=0.01)


# Permuted patches


def test_permuted_patches_are_where_the_order_says():
    images = torch.arange(2 * 3 * 8 * 12).view(2, 3, 8, 12)
    order = torch.tensor([5, 0, 3, 1, 4, 2])
    out = permute_patches(images, order, (4, 4))
    for place, source in enumerate(order.tolist()):
        (r, c), (sr, sc) = divmod(place, 3), divmod(source, 3)
        expected = images[:, :, 4 * sr : 4 * sr + 4, 4 * sc : 4 * sc + 4]
        assert torch.equal(out[:, :, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4], expected)
    assert torch.equal(permute_patches(out, order.argsort(), (4, 4)), images)
