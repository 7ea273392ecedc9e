"""Command-line tools beyond Lightning's own commands: for data, models, measurements and the machine."""
