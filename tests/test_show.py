"""Pictures of batches."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from timm_locat.data import PROTOCOLS
from timm_locat.data.show import caption, show_batch
from timm_locat.errors import UserError

CLASSES = ("Coat", "Bag", "Shirt")


def pixels(path):
    return np.asarray(Image.open(io.BytesIO(path.read_bytes())).convert("RGB"))


def test_a_caption_names_classes_and_weights_and_leaves_smoothing_out():
    assert caption(torch.tensor(1), CLASSES) == "Bag"
    assert caption(torch.tensor([0.37, 0.63, 0.0]), CLASSES) == "Bag 0.63 /\nCoat 0.37"
    assert caption(torch.tensor([0.05, 0.05, 0.9]), CLASSES) == "Shirt 0.90"


def test_the_picture_shows_each_image_at_its_colours(tmp_path):
    images = torch.zeros(3, 3, 8, 16, dtype=torch.uint8)
    for i, colour in enumerate(((255, 0, 0), (0, 255, 0), (0, 0, 255))):
        images[i] = torch.tensor(colour).view(3, 1, 1)
    show_batch(images, torch.tensor([0, 1, 2]), CLASSES, tmp_path / "batch.png", "three colours")
    picture = pixels(tmp_path / "batch.png").reshape(-1, 3)
    for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255)):
        assert (picture == colour).all(1).mean() > 0.05


def test_no_more_than_32_images_are_drawn(tmp_path):
    images = torch.zeros(40, 3, 8, 16, dtype=torch.uint8)
    images[32:, 0] = 255
    images, targets = PROTOCOLS["ls"].apply(images, torch.zeros(40, dtype=torch.long), 3, torch.Generator())
    show_batch(images, targets, CLASSES, tmp_path / "batch.png", "black, then red")
    assert not (pixels(tmp_path / "batch.png") == (255, 0, 0)).all(-1).any()


@pytest.mark.parametrize(("images", "targets"), [(0, 0), (3, 2)])
def test_nothing_to_draw_is_refused(tmp_path, images, targets):
    with pytest.raises(UserError, match=f"got {images} images and {targets} targets"):
        show_batch(torch.zeros(images, 3, 8, 16), torch.zeros(targets), CLASSES, tmp_path / "batch.png", "")
