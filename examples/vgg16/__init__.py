"""The parts of the VGG16 example: model, data and gradient exchange."""
