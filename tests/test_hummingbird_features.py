"""Maps of features: any timm model, the grid as it comes, images and masks changed together by draws of their own."""

from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

from eval.hummingbird import Protocol, Segmentation, evaluate
from eval.hummingbird.features import Extractor, ModelSource
from timm_locat.errors import UserError
from timm_locat.models import create_model

SMALL = Protocol(img_size=(64, 96), bank_size=60, epochs=2, k=5)
SWIN = {"depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (1, 1, 2, 2)}
TINY = {"depth": 1, "embed_dim": 32, "num_heads": 2}


class Pairs:
    """Squares on noise; the mask is 1 where the square is. Sides differ, and so do the images' sizes."""

    classes = ("noise", "square")

    def __init__(self, count=6, order=None, patch=8):
        self.numbers = list(range(count)) if order is None else order
        self.patch = patch

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, place):
        number = self.numbers[place]
        g = torch.Generator().manual_seed(number)
        height, width = 60 + 4 * number, 90 - 3 * number
        pixels = torch.randint(0, 100, (height, width, 3), generator=g, dtype=torch.uint8)
        mask = torch.zeros(height, width, dtype=torch.long)
        mask[10:40, 5 * number + 10 : 5 * number + 40] = 1
        pixels[mask == 1] = torch.tensor([250, 200, 100], dtype=torch.uint8)
        return Image.fromarray(pixels.numpy()), mask

    def source(self, place):
        return f"holiday_{self.numbers[place]}.png"


def found(source, protocol=SMALL):
    results, neighbours = evaluate(protocol, Segmentation(protocol, Pairs.classes), source, source)
    results.pop("seconds")
    return results, neighbours.ids


@pytest.mark.parametrize(
    ("name", "kwargs", "grid", "width"),
    [
        ("vit_tiny_patch16_224", TINY, (14, 14), 32),
        (
            "swin_tiny_patch4_window7_224",
            {"depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (1, 1, 2, 2)},
            (7, 7),
            128,
        ),
        ("convnext_femto", {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 24)}, (7, 7), 24),
        ("locatvit_tiny", TINY, (14, 14), 32),
    ],
)
def test_the_grid_is_whatever_the_model_gives(name, kwargs, grid, width):
    protocol = Protocol(img_size=(224, 224))
    maps = Extractor(name, protocol, pretrained=False, **kwargs)(torch.rand(2, 3, 224, 224))
    assert maps.shape == (2, width, *grid) and maps.dtype == torch.float32


def test_a_register_model_has_the_grid_of_its_patches_not_of_its_tokens():
    protocol = Protocol(img_size=(64, 96))
    model = Extractor("vit_tiny_patch16_224", protocol, pretrained=False, **TINY, reg_tokens=4)
    assert model(torch.rand(1, 3, 64, 96)).shape == (1, 32, 4, 6)


def test_layer_norm_and_refinement_are_chosen_by_the_protocol():
    x = torch.rand(1, 3, 64, 96)
    kwargs = {**TINY, "depth": 2}
    maps = {}
    changes = {"last": {}, "raw": {"norm": False}, "first": {"layer": -2}, "prr": {"features": "after_prr"}}
    for key, change in changes.items():
        maps[key] = Extractor("locatvit_tiny", replace(SMALL, **change), pretrained=False, **kwargs)(x)
    values = list(maps.values())
    assert all(not torch.allclose(a, b) for i, a in enumerate(values) for b in values[i + 1 :])
    torch.manual_seed(SMALL.seed)
    model = create_model("locatvit_tiny", img_size=(64, 96), **kwargs).eval()
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    wanted = model.forward_intermediates((x - mean) / std, indices=[0], norm=True, intermediates_only=True)[0]
    torch.testing.assert_close(maps["first"], wanted)


def test_raw_pixels_are_the_patches_themselves():
    protocol = Protocol(img_size=(8, 12))
    x = torch.rand(1, 3, 8, 12)
    maps = Extractor("raw-pixels:4", protocol)(x)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    patch = (x[0, :, 4:8, 8:12] - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(maps[0, :, 1, 2], patch.flatten())
    slip = Extractor("raw-pixels:4", replace(protocol, pixels="std-0.255"))(x)
    torch.testing.assert_close(slip[0, 32:, 1, 2], patch[2].flatten() * 0.225 / 0.255)
    torch.testing.assert_close(slip[0, :32], maps[0, :32])


def test_image_and_mask_are_cropped_together_and_by_the_draws_of_image_and_pass():
    source = ModelSource(Pairs(), Extractor("raw-pixels:8", SMALL))
    for index in range(3):
        image, mask = source.picture(index, 0)
        assert image.shape == (3, 64, 96) and mask.shape == (64, 96) and mask.dtype == torch.long
        bright = image[0] > 0.7
        assert (bright == (mask == 1)).float().mean() > 0.9
    same, again = source.picture(1, 0)[0], source.picture(1, 0)[0]
    other, plain = source.picture(1, 1)[0], source.picture(1, None)[0]
    assert torch.equal(same, again) and not torch.equal(same, other) and not torch.equal(same, plain)


def test_reading_leaves_the_random_stream_alone():
    source = ModelSource(Pairs(), Extractor("raw-pixels:8", SMALL))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    source.picture(0, 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_batches_workers_and_the_order_of_files_change_no_row():
    extractor = Extractor("raw-pixels:8", SMALL)
    results, ids = found(ModelSource(Pairs(), extractor, batch=4))
    shuffled = ModelSource(Pairs(order=[3, 1, 5, 0, 4, 2]), extractor, batch=4)
    for other in (ModelSource(Pairs(), extractor, batch=1, workers=2), shuffled):
        again, others = found(other)
        assert again == results and torch.equal(others, ids)


def test_a_mask_of_another_size_than_its_image_names_the_image():
    class Crooked(Pairs):
        def __getitem__(self, place):
            image, mask = super().__getitem__(place)
            return (image, mask[1:]) if self.numbers[place] == 2 else (image, mask)

    with pytest.raises(UserError, match=r"image holiday_2.png is 68x84 and its mask 67x84; they must have one size"):
        found(ModelSource(Crooked(), Extractor("raw-pixels:8", SMALL)))


def test_a_model_that_gives_nan_names_the_image():
    class Broken:
        protocol = SMALL

        def __call__(self, images):
            return torch.full((len(images), 4, 8, 12), torch.nan)

    with pytest.raises(UserError, match=r"image holiday_0.png gives features that are not finite"):
        found(ModelSource(Pairs(), Broken()))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("raw-pixels:7", {}, "expected raw-pixels:P with a patch of P pixels that divides 64x96"),
        ("raw-pixels", {}, "such as raw-pixels:4, got 'raw-pixels'"),
        ("vit_tinny_patch16_224", {}, "there is no model 'vit_tinny_patch16_224'"),
        ("vit_tiny_patch16_224", {"img_size": (60, 96)}, "60"),
        ("vit_tiny_patch16_224", {"features": "after_prr"}, "needs a model with PRR"),
        ("vit_tiny_patch16_224", {"layer": -30}, "has no layer -30; choose one nearer to -1"),
        ("locatvit_tiny", {"layer": -2, "features": "after_prr"}, "features after PRR are the last layer's"),
    ],
)
def test_what_no_model_can_do_is_said_in_a_sentence(name, changes, message):
    protocol = replace(SMALL, **changes)
    kwargs = {} if name.startswith("raw") else {**TINY, "depth": 3}
    with pytest.raises(UserError, match=message):
        Extractor(name, protocol, pretrained=False, **kwargs)(torch.rand(1, 3, *protocol.img_size))


def test_a_model_without_intermediate_features_is_refused(monkeypatch):
    monkeypatch.setattr("eval.hummingbird.features.create_model", lambda *_, **__: nn.Identity())
    with pytest.raises(UserError, match="odd has no forward_intermediates"):
        Extractor("odd", SMALL)
