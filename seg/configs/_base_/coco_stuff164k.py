"""COCO-Stuff 164k, 171 classes: data/coco_stuff164k, masks named *_labelTrainIds.png."""

_base_ = [__import__("timm_locat._mmseg_compat", fromlist=["base"]).base("datasets/coco-stuff164k.py")]
train_dataloader = dict(
    sampler=dict(type="DrawSampler"),
    dataset=dict(pipeline=[dict(type="SeedDraw"), *_base_.train_pipeline]),
)
