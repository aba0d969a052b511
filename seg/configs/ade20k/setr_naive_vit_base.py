"""SETR-Naive on fine-tuned ViT-B/16, ADE20K.

Reproduces no number that we know of. Not run here.
Cost: 160,000 updates of 16 crops, 2,560,000 image passes; not timed.

    accelerate launch -m timm_locat.train vit_base_in1k  # the backbone
    python -m seg.train seg/configs/ade20k/setr_naive_vit_base.py --cfg-options data_root=/data/ade20k
"""

_base_ = ["../_base_/ade20k.py", "../_base_/setr_naive_160k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    backbone=dict(model_name="vit_base_patch16_224", checkpoint="runs/vit_base_in1k"),
    decode_head=dict(num_classes=150),
)
