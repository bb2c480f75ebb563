"""The parts of the VGG16 example: model, data, gradient exchange and checkpoints."""
