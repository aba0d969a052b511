"""Models by name: registration, and one sentence for each request that cannot be met."""

import subprocess
import sys

import pytest
import timm
import torch

from timm_locat.errors import UserError
from timm_locat.models import create_model
from timm_locat.models._build import register_model

NAMES = sorted(n for module in ("jumbo", "locatvit", "vit_compact") for n in timm.list_models(module=module))
TINY = {"depth": 1, "embed_dim": 64, "num_heads": 2}
HEAVY = ("accelerate", "datasets", "matplotlib", "transformers", "tyro", "tqdm.contrib", "pandas")


def test_these_names_are_registered():
    assert NAMES == [
        "jumbo_base",
        "jumbo_tiny",
        "locatjumbo_base",
        "locatjumbo_tiny",
        "locatvit_base",
        "locatvit_base_reg4",
        "locatvit_compact_patch4_32",
        "locatvit_compact_patch8_64",
        "locatvit_small",
        "locatvit_tiny",
        "locatvit_tiny_reg4",
        "vit_compact_patch4_32",
        "vit_compact_patch8_64",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_forward_gives_one_logit_row_per_image(name):
    model = timm.create_model(name, depth=1).eval()
    cfg = model.pretrained_cfg
    assert model(torch.zeros(2, *cfg["input_size"])).shape == (2, cfg["num_classes"])


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("vit_compact_patch4_32", None, 2_400_586),
        ("vit_compact_patch4_32", 100, 2_417_956),
        ("vit_compact_patch8_64", None, 2_464_904),
        ("locatvit_compact_patch4_32", None, 2_400_586 + 8 * 3 * 25),
        ("locatvit_compact_patch8_64", None, 2_464_904 + 8 * 3 * 25),
    ],
)
def test_compact_models_have_the_papers_size(name, classes, count):
    kwargs = {} if classes is None else {"num_classes": classes}
    assert sum(p.numel() for p in timm.create_model(name, device="meta", **kwargs).parameters()) == count


def test_importing_is_silent_and_light():
    code = f"import sys, timm_locat; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_a_name_that_timm_has_stays_timms():
    def vit_tiny_patch16_224(pretrained=False, **kwargs):
        raise AssertionError("never called")

    before = timm.models.model_entrypoint("vit_tiny_patch16_224")
    with pytest.warns(UserWarning, match="timm has a model named 'vit_tiny_patch16_224' by now"):
        register_model(vit_tiny_patch16_224)
    assert timm.models.model_entrypoint("vit_tiny_patch16_224") is before


def test_an_unknown_model_is_answered_with_the_nearest_names():
    with pytest.raises(UserError, match=r"no model 'locatvit_tinny' .* did you mean locatvit_tiny"):
        create_model("locatvit_tinny")


def test_an_unknown_tag_is_one_sentence():
    with pytest.raises(UserError, match="weights tag that timm does not know"):
        create_model("vit_tiny_patch16_224.none", img_size=(32, 32))


def test_weights_that_do_not_exist_are_one_sentence():
    with pytest.raises(UserError, match="cannot build locatvit_small with pretrained=True: No pretrained weights"):
        create_model("locatvit_small", pretrained=True)


def test_a_folder_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"cannot build local-dir:.*gone"):
        create_model(f"local-dir:{tmp_path / 'gone'}", pretrained=True)


def test_a_wrong_build_argument_is_named_with_its_model():
    with pytest.raises(UserError, match=r"cannot build vit_tiny_patch16_224 with .*dept=1.*'dept'"):
        create_model("vit_tiny_patch16_224", dept=1)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "locatvit_tiny"])
def test_a_size_that_is_no_multiple_of_the_patch_is_refused(name):
    with pytest.raises(UserError, match=r"multiple of the 16x16 patch, got 32x40; use 32x32 or 32x48"):
        create_model(name, img_size=(32, 40), **TINY)


def test_a_model_of_any_size_is_built_without_one():
    model = create_model("resnet10t", img_size=(32, 48), num_classes=3).eval()
    assert model(torch.zeros(1, 3, 32, 48)).shape == (1, 3)
