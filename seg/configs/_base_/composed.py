"""Composed scenes of timm_locat.data.scenes in a folder of their own; 11 classes, 0 is the background and counts."""

scenes = __import__("timm_locat.data.scenes", fromlist=["CLASSES"])
data_root = "runs/seg_demo/scenes"
metainfo = dict(classes=scenes.CLASSES, palette=[list(colour) for colour in scenes.PALETTE])
del scenes
train_pipeline = [
    dict(type="SeedDraw"),
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations"),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PhotoMetricDistortion"),
    dict(type="PackSegInputs"),
]
test_pipeline = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations"), dict(type="PackSegInputs")]
tta_pipeline = [
    dict(type="LoadImageFromFile", backend_args=None),
    dict(
        type="TestTimeAug",
        transforms=[
            [dict(type="RandomFlip", prob=p, direction="horizontal") for p in (0.0, 1.0)],
            [dict(type="LoadAnnotations")],
            [dict(type="PackSegInputs")],
        ],
    ),
]
dataset = dict(type="BaseSegDataset", data_root=data_root, img_suffix=".png", seg_map_suffix=".png", metainfo=metainfo)
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type="DrawSampler", shuffle=True),
    dataset=dict(
        **dataset,
        data_prefix=dict(img_path="images/training", seg_map_path="annotations/training"),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=0,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(
        **dataset,
        data_prefix=dict(img_path="images/validation", seg_map_path="annotations/validation"),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="IoUMetric", iou_metrics=["mIoU"])
test_evaluator = val_evaluator
