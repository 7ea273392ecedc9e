"""The domains, a folder each, and the command line that trains them."""
