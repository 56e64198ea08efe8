"""Running models in onnxruntime."""
