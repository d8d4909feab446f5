"""From one sharding of tensors to another: boxes, layouts, which rank sends what and when. Pure."""
