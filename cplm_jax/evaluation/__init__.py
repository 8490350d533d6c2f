"""What a model is measured by: validation, copying, and the comparison of two runs."""
