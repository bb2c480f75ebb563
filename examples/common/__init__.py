"""What the examples share: options, process groups, launchers and checkpoints."""
