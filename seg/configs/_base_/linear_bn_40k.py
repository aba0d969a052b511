"""Batch norm and one linear layer on the last block of a frozen backbone, 40,000 updates, as DINOv2 evaluates.

Source: arXiv:2304.07193. Learning rate, weight decay and schedule are our choice after its published configuration.
"""

model = dict(
    type="TimmSegmentor",
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(type="TimmViT", out_indices=(-1,), trainable="none"),
    decode_head=dict(type="BNLinearHead", align_corners=False),
    train_cfg=dict(),
    test_cfg=dict(mode="slide", crop_size=(512, 512), stride=(341, 341)),
)
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-4))
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type="PolyLR", eta_min=0.0, power=1.0, begin=1500, end=40000, by_epoch=False),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=40000, val_interval=4000)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=4000, max_keep_ckpts=2, save_best="mIoU"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="SegVisualizationHook"),
)
