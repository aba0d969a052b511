"""Segmenter (arXiv:2105.05633): the stock mask transformer on the last block, the whole model trained.

The rows set width and heads of the mask transformer, which are the backbone's. Optimizer and schedule are those of
`upernet_160k`, our choice.
"""

model = dict(
    type="TimmSegmentor",
    data_preprocessor=dict(size=(512, 512)),
    backbone=dict(type="TimmViT", out_indices=(-1,), model_args=dict(drop_path_rate=0.1)),
    decode_head=dict(
        type="SegmenterMaskTransformerHead",
        num_layers=2,
        dropout_ratio=0.0,
        align_corners=False,
        loss_decode=dict(type="CrossEntropyLoss", use_sigmoid=False, loss_weight=1.0),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode="slide", crop_size=(512, 512), stride=(480, 480)),
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
