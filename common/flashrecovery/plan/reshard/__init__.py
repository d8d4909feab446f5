"""From one sharding of tensors to another: boxes, layouts, who sends what and when. Pure."""
