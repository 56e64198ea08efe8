"""What will be done with a model: where sites go, what outputs mean, what stands beside them."""
