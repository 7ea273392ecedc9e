"""Command-line tools in addition to Lightning's commands: for data, models, measurements and the machine."""
