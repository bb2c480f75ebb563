"""The parts of the BERT example: model, documents and their tokens."""
