"""The parts of the example of linear models: data, models and gradient exchange."""
