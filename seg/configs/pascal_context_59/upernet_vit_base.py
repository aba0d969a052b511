"""UPerNet on fine-tuned ViT-B/16, PASCAL Context 59.

Reproduces no number that we know of. Not run here.
Cost: 160,000 updates of 16 crops, 2,560,000 image passes; not timed.

    accelerate launch -m timm_locat.train vit_base_in1k  # the backbone
    python -m seg.train seg/configs/pascal_context_59/upernet_vit_base.py --cfg-options data_root=/data/voc10
"""

_base_ = ["../_base_/pascal_context_59.py", "../_base_/upernet_160k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    data_preprocessor=dict(size=(480, 480)),
    backbone=dict(model_name="vit_base_patch16_224", checkpoint="runs/vit_base_in1k"),
    decode_head=dict(num_classes=59),
    auxiliary_head=dict(num_classes=59),
    test_cfg=dict(crop_size=(480, 480), stride=(320, 320)),
)
