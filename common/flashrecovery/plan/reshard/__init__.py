"""From one division of tensors to another: boxes, layouts, who sends what and when. Pure."""
