"""Dense features: one NCHW map per image, before or after patch representation refinement."""

from typing import Literal

from torch import Tensor, nn

__all__ = ["dense_features"]


def dense_features(
    model: nn.Module,
    x: Tensor,
    features: Literal["before_prr", "after_prr"] = "before_prr",
    *,
    norm: bool = False,
) -> Tensor:
    """Patch features of the last block as a map.

    Args:
        model: Any timm model with `forward_intermediates`; `after_prr` needs one with PRR, such as `LocAtViT`.
        x: (B, 3, height, width) images, normalised as the model expects.
        features: `before_prr` is what the last block returns, which is what arXiv:2603.04892 gives to segmentation
            heads. `after_prr` is final norm, then PRR over all tokens, then the patch tokens.
        norm: Apply the final norm to `before_prr` as well. `after_prr` always has it, as it has in the classifier.

    Returns:
        (B, C, H, W), H and W in patches.

    Raises:
        ValueError: An unknown name in `features`, or `after_prr` of a model that has no PRR.
    """
    if features == "before_prr":
        return model.forward_intermediates(x, indices=[-1], norm=norm, intermediates_only=True)[0]
    if features != "after_prr":
        raise ValueError(f"features must be 'before_prr' or 'after_prr', got {features!r}")
    refine = getattr(model, "refine", None)
    if refine is None:
        raise ValueError(
            f"features='after_prr' needs a model with PRR, such as locatvit_base, got {type(model).__name__}; "
            "use 'before_prr'"
        )
    tokens = model.forward_features(x)
    if tokens.ndim == 4:  # a Swin: (B, H, W, C), and patches only
        patches = tokens.flatten(1, 2)
        return refine(patches, patches).view_as(tokens).permute(0, 3, 1, 2).contiguous()
    patches = refine(tokens, tokens)[:, model.num_prefix_tokens :]
    height, width = model.patch_embed.dynamic_feat_size((x.shape[-2], x.shape[-1]))
    return patches.transpose(1, 2).unflatten(2, (height, width)).contiguous()
