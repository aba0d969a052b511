"""ADE20K, 150 classes: data/ade/ADEChallengeData2016 with images/ and annotations/, 0 is ignored."""

_base_ = [__import__("timm_locat._mmseg_compat", fromlist=["base"]).base("datasets/ade20k.py")]
train_dataloader = dict(
    sampler=dict(type="DrawSampler"),
    dataset=dict(pipeline=[dict(type="SeedDraw"), *_base_.train_pipeline]),
)
