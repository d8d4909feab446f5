"""What the controller keeps on disk: generations, node failures, what an earlier launch has left."""
