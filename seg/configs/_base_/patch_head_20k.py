"""The protocol of arXiv:2603.04892: frozen backbone, last block without the final norm, two 1x1 convolutions, 20,000
updates.

As in its code: AdamW at 1e-3, weight decay 0.01, a linear one-cycle schedule with a quarter of warm-up, whole images.
It trains with 32 images per update, which the rows set, and normalises with ImageNet's mean and std, where ours come
from the backbone.
"""

max_iters = 20000
model = dict(
    type="TimmSegmentor",
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(type="TimmViT", out_indices=(-1,), norm=False, trainable="none"),
    decode_head=dict(type="PatchHead", channels=512, align_corners=False),
    train_cfg=dict(),
    test_cfg=dict(mode="whole"),
)
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01))
param_scheduler = [
    dict(
        type="OneCycleLR",
        eta_max=1e-3,
        total_steps=max_iters,
        pct_start=0.25,
        anneal_strategy="linear",
        div_factor=1e4,
        final_div_factor=1e4,
        by_epoch=False,
    )
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=max_iters, val_interval=4000)
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
