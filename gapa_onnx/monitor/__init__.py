"""What a model says while it serves: metrics, and whether its inputs have changed."""
