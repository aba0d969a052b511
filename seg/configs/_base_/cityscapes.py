"""Cityscapes, 19 classes: data/cityscapes, masks named *_gtFine_labelTrainIds.png."""

_base_ = [__import__("timm_locat._mmseg_compat", fromlist=["base"]).base("datasets/cityscapes.py")]
train_dataloader = dict(
    sampler=dict(type="DrawSampler"),
    dataset=dict(pipeline=[dict(type="SeedDraw"), *_base_.train_pipeline]),
)
