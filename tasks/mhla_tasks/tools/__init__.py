"""Tools of the command line that complement Lightning's commands: for data, models, measurements and the machine."""
