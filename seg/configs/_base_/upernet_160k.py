"""UPerNet on four scales of the last block, the whole model trained for 160,000 updates with layer decay.

Learning rate 1e-4, layer decay 0.65 and weight decay 0.05 after the published fine-tuning of MAE and BEiT for ADE20K;
the pyramid after arXiv:2203.16527. Trains with 16 images per update, which the rows set.
"""

norm_cfg = dict(type="SyncBN", requires_grad=True)
model = dict(
    type="TimmSegmentor",
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(type="TimmViT", out_indices=(-1,), model_args=dict(drop_path_rate=0.1)),
    neck=dict(type="SimplePyramid", out_channels=256),
    decode_head=dict(
        type="UPerHead",
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        norm_cfg=norm_cfg,
        align_corners=False,
    ),
    auxiliary_head=dict(
        type="FCNHead",
        in_index=2,
        channels=256,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.1,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", loss_weight=0.4),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="slide", crop_size=(512, 512), stride=(341, 341)),
)
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=1e-4, betas=(0.9, 0.999), weight_decay=0.05),
    constructor="TimmLayerDecay",
    paramwise_cfg=dict(layer_decay=0.65),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-6, by_epoch=False, begin=0, end=1500),
    dict(type="PolyLR", eta_min=0.0, power=1.0, begin=1500, end=160000, by_epoch=False),
]
train_cfg = dict(type="IterBasedTrainLoop", max_iters=160000, val_interval=16000)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
default_hooks = dict(
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=16000, max_keep_ckpts=2, save_best="mIoU"),
    sampler_seed=dict(type="DistSamplerSeedHook"),
    visualization=dict(type="SegVisualizationHook"),
)
