"""PASCAL Context with background as a class, 60 in all: the same files as for 59."""

_base_ = [__import__("timm_locat._mmseg_compat", fromlist=["base"]).base("datasets/pascal_context.py")]
train_dataloader = dict(
    sampler=dict(type="DrawSampler"),
    dataset=dict(pipeline=[dict(type="SeedDraw"), *_base_.train_pipeline]),
)
# The stock file of 60 classes has none.
tta_pipeline = [
    dict(type="LoadImageFromFile", backend_args=None),
    dict(
        type="TestTimeAug",
        transforms=[
            [dict(type="Resize", scale_factor=ratio, keep_ratio=True) for ratio in (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)],
            [dict(type="RandomFlip", prob=p, direction="horizontal") for p in (0.0, 1.0)],
            [dict(type="LoadAnnotations")],
            [dict(type="PackSegInputs")],
        ],
    ),
]
