"""Pretrained checkpoint to two-axis model, equal at step 0.

source ──► family: config and names ──► our model, new parameters neutral ──► measured against the source ──► folder
"""
