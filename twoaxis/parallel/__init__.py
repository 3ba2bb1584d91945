"""Models on several devices, with torch's own engines: functions that are applied to a model from outside.

shard       FSDP2: every device holds a part of every tensor
tensor      tensor parallelism: devices share the matrices of each sub-layer
pipeline    devices share the depth; boundaries carry the packed state of the stream
"""
