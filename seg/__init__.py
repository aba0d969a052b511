"""Segmentation with mmsegmentation: configs and commands that run from a checkout. See README.md."""
