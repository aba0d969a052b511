"""The paper's head on frozen LocAtViT-B/16, PASCAL Context 59.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 45.35. Not run here.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    python -m seg.train seg/configs/pascal_context_59/patch_head_locatvit_base.py --cfg-options data_root=/data/voc10
"""

_base_ = ["../_base_/pascal_context_59.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    data_preprocessor=dict(size=(480, 480)),
    backbone=dict(model_name="locatvit_base.in1k", pretrained=True),
    decode_head=dict(num_classes=59),
)
