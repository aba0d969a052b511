"""PASCAL Context, 59 classes: data/VOCdevkit/VOC2010 with SegmentationClassContext; 0 (background) is ignored."""

_base_ = [__import__("timm_locat._mmseg_compat", fromlist=["base"]).base("datasets/pascal_context_59.py")]
train_dataloader = dict(
    sampler=dict(type="DrawSampler"),
    dataset=dict(pipeline=[dict(type="SeedDraw"), *_base_.train_pipeline]),
)
