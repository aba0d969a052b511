"""PASCAL VOC 2012, 21 classes: data/VOCdevkit/VOC2012, train and the aug list with SegmentationClassAug."""

_base_ = [__import__("timm_locat._mmseg_compat", fromlist=["base"]).base("datasets/pascal_voc12_aug.py")]
pipeline = [dict(type="SeedDraw"), *_base_.train_pipeline]
train_dataloader = dict(
    sampler=dict(type="DrawSampler"),
    dataset=dict(
        datasets=[{**_base_.dataset_train, "pipeline": pipeline}, {**_base_.dataset_aug, "pipeline": pipeline}]
    ),
)
