"""Tools beside the commands of Lightning: data, models, measurements, the machine."""
