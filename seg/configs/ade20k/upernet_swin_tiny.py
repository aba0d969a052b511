"""UPerNet on fine-tuned Swin-T, ADE20K.

Reproduces no number that we know of. Not run here.
The weights are those of Swin's authors, not the paper's.
Cost: 160,000 updates of 16 crops, 2,560,000 image passes; not timed.

    python -m seg.train seg/configs/ade20k/upernet_swin_tiny.py --cfg-options data_root=/data/ade20k
"""

_base_ = ["../_base_/ade20k.py", "../_base_/upernet_160k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=16, num_workers=8)
model = dict(
    backbone=dict(out_indices=(0, 1, 2, 3), model_name="swin_tiny_patch4_window7_224.ms_in1k", pretrained=True),
    neck=None,
    decode_head=dict(num_classes=150),
    auxiliary_head=dict(num_classes=150),
)
