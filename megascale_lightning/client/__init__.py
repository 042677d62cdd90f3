"""On the rank: from the windows of its group to tensors, and the state of what was consumed."""
