"""Loggers: what sends statistics, images, scores and models of a run to TensorBoard, wandb and the like."""
