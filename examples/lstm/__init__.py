"""The parts of the LSTM example: model, data and decoding."""
