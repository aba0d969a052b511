"""The paper's head on frozen LocAtViT-Ti/16 with registers, ADE20K.

The paper's mIoU (arXiv:2603.04892, its table, as reported by readers): 24.39. Not run here.
Four registers are our choice; the paper's number of them is not known to us.
Cost: 20,000 updates of 32 crops, 640,000 image passes; not timed.

    accelerate launch -m timm_locat.train locatvit_tiny_in1k --model-kwargs '{"reg_tokens":4}' --out runs/locatvit_reg4
    python -m seg.train seg/configs/ade20k/patch_head_locatvit_tiny_reg.py --cfg-options data_root=/data/ade20k
"""

_base_ = ["../_base_/ade20k.py", "../_base_/patch_head_20k.py", "../_base_/runtime.py"]
train_dataloader = dict(batch_size=32, num_workers=8)
model = dict(
    backbone=dict(model_name="locatvit_tiny", model_args=dict(reg_tokens=4), checkpoint="runs/locatvit_reg4"),
    decode_head=dict(num_classes=150),
)
