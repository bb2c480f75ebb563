"""The parts of the language model example: model and text."""
